"""A plain TCP stream, to measure a link: stream.py listen prints its port; stream.py HOST PORT BYTES sends."""

import socket
import sys
import time

PIECE = bytes(1 << 20)


def listen():
    """Receives one stream after the other; prints the seconds from its first byte to its last, and its bytes."""
    with socket.create_server(("", 0)) as server:
        print(server.getsockname()[1], flush=True)
        room = memoryview(bytearray(1 << 20))
        while True:
            connection, _ = server.accept()
            total, began = connection.recv_into(room), time.perf_counter()
            while n := connection.recv_into(room):
                total += n
            print(time.perf_counter() - began, total, flush=True)


def send(host, port, bytes):
    """Sends a stream of whole MiB."""
    with socket.create_connection((host, port)) as connection:
        for _ in range(bytes // len(PIECE)):
            connection.sendall(PIECE)


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen()
    else:
        send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
