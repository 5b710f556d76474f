package jobtest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Hosts are network namespaces, each with a link to a bridge in a further one, like machines on a switch.
type Hosts struct {
	t    testing.TB
	name string
}

// host i has the address 10.97.0.(i+1), the switch 10.97.0.254.
func (h *Hosts) host(i int) string { return fmt.Sprint(h.name, "-", i) }

func (h *Hosts) hub() string { return h.name + "-hub" }

// MakeHosts makes n hosts, and removes them with the test.
func MakeHosts(t testing.TB, n int) *Hosts {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need the command ip, from the package iproute2")
	}
	h := &Hosts{t, fmt.Sprintf("pl-%d-%d", os.Getpid(), time.Now().UnixNano()%1e6)}
	if out, err := exec.Command("ip", "netns", "add", h.hub()).CombinedOutput(); err != nil {
		t.Skipf("no network namespaces here: %s", out)
	}
	t.Cleanup(func() { h.ip("netns", "del", h.hub()) })
	h.ip("-n", h.hub(), "link", "add", "br0", "type", "bridge")
	h.ip("-n", h.hub(), "addr", "add", "10.97.0.254/24", "dev", "br0")
	h.ip("-n", h.hub(), "link", "set", "br0", "up")
	h.ip("-n", h.hub(), "link", "set", "lo", "up")
	for i := range n {
		h.ip("netns", "add", h.host(i))
		t.Cleanup(func() { h.ip("netns", "del", h.host(i)) })
		port := fmt.Sprint("port", i)
		h.ip("-n", h.hub(), "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", h.host(i))
		h.ip("-n", h.hub(), "link", "set", port, "master", "br0", "up")
		h.ip("-n", h.host(i), "addr", "add", fmt.Sprintf("10.97.0.%d/24", i+1), "dev", "eth0")
		h.ip("-n", h.host(i), "link", "set", "eth0", "up")
		h.ip("-n", h.host(i), "link", "set", "lo", "up")
	}
	return h
}

func (h *Hosts) ip(args ...string) {
	h.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		h.t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

func (h *Hosts) inside(namespace string) []string { return []string{"ip", "netns", "exec", namespace} }

// Unplug takes the link of a host down. No process is told.
func (h *Hosts) Unplug(i int) { h.ip("-n", h.hub(), "link", "set", fmt.Sprint("port", i), "down") }

// Fleet starts a job of one worker on each of n hosts and a server on each of the next. The scheduler
// is at the switch. Peers are lost after 3 s of silence.
func (h *Hosts) Fleet(n, servers int) *Fleet {
	h.t.Helper()
	f := &Fleet{t: h.t}
	const timeouts = "PACELINE_PEER_TIMEOUT=3s"
	f.Scheduler = startProcess(h.t, h.inside(h.hub()), "scheduler", listenAt+"=10.97.0.254:0", timeouts)
	f.address = strings.TrimPrefix(f.Scheduler.Says("listens", Hang), "listens ")
	common := []string{timeouts, "PACELINE_SCHEDULER=" + f.address, fmt.Sprint("PACELINE_SIZE=", n), fmt.Sprint("PACELINE_NUM_SERVERS=", servers)}
	if servers > 0 {
		common = append(common, "PACELINE_SERVERS=both")
	}
	for i := range servers {
		f.Servers = append(f.Servers, startProcess(h.t, h.inside(h.host(n+i)), "server", append(common, "PACELINE_HOST="+h.host(n+i))...))
	}
	for rank := range n {
		f.Workers = append(f.Workers, startProcess(h.t, h.inside(h.host(rank)), "worker",
			append(common, fmt.Sprint("PACELINE_RANK=", rank), "PACELINE_HOST="+h.host(rank))...))
	}
	f.Steps()
	return f
}
