"""Where the ranks of a Horovod job on this host find each other: rendezvous.py RANKS prints its port."""

import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

server = RendezvousServer()
print(server.start(), flush=True)
server.init(get_host_assignments(parse_hosts(f"localhost:{sys.argv[1]}"), int(sys.argv[1])))
sys.stdin.read()
server.stop()
