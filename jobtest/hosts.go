package jobtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
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

// CanMakeHosts is why MakeHosts skips its test, nil where it does not.
var CanMakeHosts = sync.OnceValue(func() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		return errors.New("network namespaces need the command ip, from the package iproute2")
	}
	name := fmt.Sprintf("pl-%d", os.Getpid())
	if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
		return fmt.Errorf("no network namespaces here: %s", out)
	}
	return exec.Command("ip", "netns", "del", name).Run()
})

// MakeHosts makes n hosts, and removes them with the test.
func MakeHosts(t testing.TB, n int) *Hosts {
	t.Helper()
	if why := CanMakeHosts(); why != nil {
		t.Skip(why)
	}
	h := &Hosts{t, fmt.Sprintf("pl-%d-%d", os.Getpid(), time.Now().UnixNano()%1e6)}
	h.ip("netns", "add", h.hub())
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

// Replug ends Unplug.
func (h *Hosts) Replug(i int) { h.ip("-n", h.hub(), "link", "set", fmt.Sprint("port", i), "up") }

// Part takes some hosts from the switch to another one, with a pause between them: they reach each other, and nobody else. It returns for how long the first has not reached the last.
func (h *Hosts) Part(pause time.Duration, hosts ...int) (took time.Duration) {
	h.ip("-n", h.hub(), "link", "add", "br1", "type", "bridge")
	h.ip("-n", h.hub(), "link", "set", "br1", "up")
	var began time.Time
	for n, i := range hosts {
		if n > 0 {
			time.Sleep(pause)
		} else {
			began = time.Now()
		}
		h.ip("-n", h.hub(), "link", "set", fmt.Sprint("port", i), "master", "br1")
	}
	return time.Since(began)
}

// hostTimeout is how long the peers of a job over several hosts may be silent.
const hostTimeout = 3 * time.Second

// Fleet starts a job of one worker on each of n hosts and a server on each of the next, and waits until it trains. The scheduler is at the switch.
func (h *Hosts) Fleet(n, servers int) *Fleet {
	h.t.Helper()
	f := h.Launch(n, servers, "PACELINE_SERVERS=both")
	f.Steps()
	return f
}

// Launch is Fleet without the wait.
func (h *Hosts) Launch(n, servers int, env ...string) *Fleet {
	h.t.Helper()
	f := &Fleet{t: h.t, before: h.inside(h.hub()), env: append(env, fmt.Sprint("PACELINE_PEER_TIMEOUT=", hostTimeout))}
	f.startScheduler("10.97.0.254:0")
	h.start(f, n, servers, f.address, "PACELINE_SCHEDULER="+f.address)
	return f
}

// LaunchOfWorkers is Launch with the scheduler in rank 0, as launchers other than Paceline's own start a job.
func (h *Hosts) LaunchOfWorkers(n, servers int, env ...string) *Fleet {
	h.t.Helper()
	f := &Fleet{t: h.t, env: append(env, fmt.Sprint("PACELINE_PEER_TIMEOUT=", hostTimeout))}
	h.start(f, n, servers, "10.97.0.1:7000", "MASTER_ADDR=10.97.0.1", "PACELINE_PORT=7000")
	return f
}

// LaunchOfTwoAddresses is Launch with a scheduler on host a, that may also be on host b.
func (h *Hosts) LaunchOfTwoAddresses(n, servers, a, b int, env ...string) *Fleet {
	h.t.Helper()
	address := func(host int) string { return fmt.Sprintf("10.97.0.%d:7000", host+1) }
	f := &Fleet{t: h.t, before: h.inside(h.host(a)), env: append(env, fmt.Sprint("PACELINE_PEER_TIMEOUT=", hostTimeout)), other: address(b)}
	f.startScheduler(address(a))
	f.before = h.inside(h.host(b)) // of the next one
	both := address(a) + "," + address(b)
	h.start(f, n, servers, both, "PACELINE_SCHEDULER="+both)
	return f
}

// start starts the nodes: servers find the scheduler at an address, workers as their environment says.
func (h *Hosts) start(f *Fleet, n, servers int, scheduler string, ofWorkers ...string) {
	common := append(slices.Clone(f.env), fmt.Sprint("PACELINE_SIZE=", n), fmt.Sprint("PACELINE_NUM_SERVERS=", servers))
	f.startServer = func() *Process {
		host := h.host(n + len(f.Servers))
		return startProcess(h.t, h.inside(host), "server", append(slices.Clone(common), "PACELINE_SCHEDULER="+scheduler, "PACELINE_HOST="+host)...)
	}
	for range servers {
		f.AddServer()
	}
	for rank := range n {
		f.Workers = append(f.Workers, startProcess(h.t, h.inside(h.host(rank)), "worker",
			slices.Concat(common, ofWorkers, []string{fmt.Sprint("PACELINE_RANK=", rank), "PACELINE_HOST=" + h.host(rank)})...))
	}
}
