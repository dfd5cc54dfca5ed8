"""Names on the wire between the roles."""

from collections.abc import Mapping

KEY_HEADER = "x-asyncgrpo-key"
"""Header with the run's key: it opens a replica. The bearer token only opens the gateway of an exposed port."""


def upstream_headers(environ: Mapping[str, str]) -> dict[str, str]:
    """Headers that open a replica's gateway and the replica itself, from `ASYNCGRPO_KEY` and `HF_TOKEN`."""
    headers = {}
    if key := environ.get("ASYNCGRPO_KEY"):
        headers[KEY_HEADER] = key
    if token := environ.get("HF_TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    return headers
