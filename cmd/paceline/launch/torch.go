package launch

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"

	"github.com/paceline/paceline/internal/iface"
)

// Ports for rank 0's store lie below those that systems hand out, to outgoing connections and to those who ask for any.
const firstPort, ports = 16384, 16384

// rendezvous is the address of torch.distributed's rendezvous, as torchrun says it: on rank 0's host, whatever the user's
// environment has. The port is free there now, if that is this host; on another one it is any.
func (j *maker) rendezvous() (map[string]string, error) {
	host, port := j.workers[0].Host, firstPort+rand.IntN(ports)
	if j.here(host) {
		var err error
		if host, err = j.ownAddress(); err != nil { // the hosts' names are for the remote shell alone
			host = j.hostname
		}
		if port, err = freePort(); err != nil {
			return nil, fmt.Errorf("no port for MASTER_PORT: %w", err)
		}
	}
	if j.MasterPort > 0 {
		port = j.MasterPort
	}
	return map[string]string{"MASTER_ADDR": host, "MASTER_PORT": strconv.Itoa(port)}, nil
}

// freePort is a port of this host at which nobody listens. The system gives it to no other process before rank 0 does: it gives higher ones.
func freePort() (port int, err error) {
	for range 100 {
		port = firstPort + rand.IntN(ports)
		var l net.Listener
		if l, err = net.Listen("tcp", ":"+strconv.Itoa(port)); err == nil { // as torch's store does
			return port, l.Close()
		}
	}
	return 0, err
}

// ownAddress is this host's address for the others of the job: on loopback for a local job.
func (j *maker) ownAddress() (string, error) {
	away := j.away()
	switch names := j.Env["PACELINE_INTERFACE"]; {
	case len(away) == 0 && (j.Elastic == nil || names == ""): // elsewhere hosts may come later
		return iface.Loopback, nil
	case names != "":
		host, err := iface.Address(names)
		if err != nil {
			err = fmt.Errorf("--network-interfaces: %w", err)
		}
		return host, err
	}
	for _, host := range away {
		own, err := iface.Towards(host)
		if err != nil {
			return "", fmt.Errorf("%w: give --network-interfaces those of this machine's interfaces or addresses that the hosts can reach", err)
		}
		if !iface.IsLoopback(own) {
			return own, nil
		} // it is a name of this machine: many have their own at 127.0.1.1 in /etc/hosts
	}
	if own, err := iface.Outward(); err == nil {
		return own, nil
	}
	return iface.Loopback, nil // there are no others
}
