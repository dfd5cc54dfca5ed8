"""A local stand-in for the Hub: Jobs, their processes, exposed ports, bucket and faults."""
