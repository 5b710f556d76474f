package jobtest_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// hosts are network namespaces, each with a line to a bridge in one more: as many machines on a switch.
type hosts struct {
	t    testing.TB
	name string
}

// host i has the address 10.97.0.(i+1), the switch 10.97.0.254.
func (h *hosts) host(i int) string { return fmt.Sprint(h.name, "-", i) }
func (h *hosts) hub() string       { return h.name + "-hub" }

// makeHosts makes n hosts, and removes them with the test.
func makeHosts(t testing.TB, n int) *hosts {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need the command ip, from the package iproute2")
	}
	h := &hosts{t, fmt.Sprintf("pl-%d-%d", os.Getpid(), time.Now().UnixNano()%1e6)}
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

func (h *hosts) ip(args ...string) {
	h.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		h.t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

func (h *hosts) inside(namespace string) []string { return []string{"ip", "netns", "exec", namespace} }

// unplug takes the line of a host down: nobody there or elsewhere is told of it.
func (h *hosts) unplug(i int) { h.ip("-n", h.hub(), "link", "set", fmt.Sprint("port", i), "down") }

// fleet starts a job of one worker on each of n hosts and a server on each of the next. The scheduler
// is at the switch. Peers are lost after 3 s of silence.
func (h *hosts) fleet(n, servers int) *fleet {
	h.t.Helper()
	f := &fleet{t: h.t}
	const timeouts = "PACELINE_PEER_TIMEOUT=3s"
	f.scheduler = startProcess(h.t, h.inside(h.hub()), "scheduler", listenAt+"=10.97.0.254:0", timeouts)
	f.address = strings.TrimPrefix(f.scheduler.says("listens", hang), "listens ")
	common := []string{timeouts, "PACELINE_SCHEDULER=" + f.address, fmt.Sprint("PACELINE_SIZE=", n), fmt.Sprint("PACELINE_NUM_SERVERS=", servers)}
	if servers > 0 {
		common = append(common, "PACELINE_SERVERS=both")
	}
	for i := range servers {
		f.servers = append(f.servers, startProcess(h.t, h.inside(h.host(n+i)), "server", append(common, "PACELINE_HOST="+h.host(n+i))...))
	}
	for rank := range n {
		f.workers = append(f.workers, startProcess(h.t, h.inside(h.host(rank)), "worker",
			append(common, fmt.Sprint("PACELINE_RANK=", rank), "PACELINE_HOST="+h.host(rank))...))
	}
	f.steps()
	return f
}

// halfOpen is the peers' timeout and a few seconds.
const halfOpen = 3*time.Second + 5*time.Second

func TestAJobOverSeveralHosts(t *testing.T) {
	f := makeHosts(t, 4).fleet(3, 1)
	f.steps()
}

func TestAHostThatIsCutOffIsAnErrorOnEveryRankSoon(t *testing.T) {
	t.Run("a worker's", func(t *testing.T) {
		h := makeHosts(t, 3)
		f := h.fleet(3, 0)
		h.unplug(1)
		cut := f.workers[1]
		f.workers[1] = nil
		f.fails(halfOpen, "worker 1")
		if err := cut.failure(halfOpen); !strings.HasPrefix(err, "error: peer lost") && !strings.Contains(err, "peer lost") {
			t.Errorf("the rank that was cut off: %q", err)
		}
	})
	t.Run("a server's", func(t *testing.T) {
		h := makeHosts(t, 3)
		f := h.fleet(2, 1)
		h.unplug(2)
		f.fails(halfOpen, "server ")
	})
}
