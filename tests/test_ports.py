import os
import socket

import pytest

from emulator.ports import FIRST_PORT, LAST_PORT, free_port, listens


def test_free_port_is_below_the_systems_own_and_not_taken():
    port = free_port()
    assert FIRST_PORT <= port <= LAST_PORT
    with pytest.raises(OSError, match="no free port"):
        free_port(range(FIRST_PORT, LAST_PORT + 1))


def test_listens_knows_whose_socket_it_is():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not listens([os.getpid()], port)  # bound, not listening
        listener.listen()
        assert listens([os.getpid()], port)
        assert not listens([os.getppid()], port)
        assert not listens([], port)
