package launch

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/paceline/paceline/core/fleet"
	"github.com/paceline/paceline/internal/iface"
)

func TestHostsAreReadAsHorovodAndOpenMPIWriteThem(t *testing.T) {
	for text, want := range map[string]string{
		"a:2,b:3":             "[{a 2} {b 3}]",
		"a, b:2":              "[{a 1} {b 2}]",
		"a:1,b:1,a:2":         "[{a 3} {b 1}]",
		"10.0.0.1:4":          "[{10.0.0.1 4}]",
		"[fe80::1]:2,fe80::2": "[{fe80::1 2} {fe80::2 1}]",
	} {
		if got, err := ParseHosts(text); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%q: %v %v", text, got, err)
		}
	}
	file := "# cluster\n\nnode1 slots=2\nnode2 slots=4 max_slots=8 # big\nnode3:3\nnode4\n"
	if got, err := ParseHostFile(strings.NewReader(file)); err != nil || fmt.Sprint(got) != "[{node1 2} {node2 4} {node3 3} {node4 1}]" {
		t.Error(got, err)
	}
}

func TestWhatADiscoveryScriptPrints(t *testing.T) {
	for text, want := range map[string]string{
		"":                       "[]",
		"a:2\nb\n\n  c:1 \n":     "[{a 2} {b 4} {c 1}]",
		"fe80::1\n[fe80::2]:3\n": "[{fe80::1 4} {fe80::2 3}]",
		"a\nb:0\na:1\n":          "[{a 1}]", // as Horovod reads them
		"fe80::0\na:0\na:10\n":   "[{fe80::0 4} {a 10}]",
	} {
		if got, err := ParseFound(text, 4); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%q: %v %v", text, got, err)
		}
	}
	if _, err := ParseFound("a:2\nb;rm\n", 1); err == nil || !strings.Contains(err.Error(), "is not the name of a host") {
		t.Error(err)
	}
}

// TestDiscovery runs scripts that work, fail, hang and change their mind.
func TestDiscovery(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hosts")
	write := func(text string) {
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	write("a:2\n")
	e := &discovery{Elastic: &Elastic{Script: "cat " + file}}
	first, err := e.discover(t.Context())
	if err != nil || fmt.Sprint(first) != "[{a 2}]" {
		t.Fatal(first, err)
	}
	said := make(chan string, 10)
	found, stop := e.watch(first, func(format string, args ...any) { said <- fmt.Sprintf(format, args...) })
	defer stop()
	write("a:2\nb\n")
	if hosts := <-found; fmt.Sprint(hosts) != "[{a 2} {b 1}]" {
		t.Fatal(hosts)
	}
	write("b;\n")
	if text := <-said; !strings.Contains(text, "is not the name of a host; the hosts stay as they were") {
		t.Fatal(text)
	}
	write("") // as from a pipe whose first command fails
	if text := <-said; !strings.Contains(text, "prints no host; the hosts stay as they were") {
		t.Fatal(text)
	}
	write("a\n")
	if hosts := <-found; fmt.Sprint(hosts) != "[{a 1}]" {
		t.Fatal(hosts)
	}
	if _, err := (&discovery{Elastic: &Elastic{Script: "echo broken >&2; exit 3"}}).discover(t.Context()); err == nil || !strings.Contains(err.Error(), "exit status 3: broken") {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := (&discovery{Elastic: &Elastic{Script: "sleep 1000"}}).discover(ctx); err == nil || !strings.Contains(err.Error(), "has not ended") {
		t.Fatal(err)
	}
}

func TestADiscoveryScriptThatIsGivenUpLeavesNothingBehind(t *testing.T) {
	adopt()
	e := &discovery{Elastic: &Elastic{Script: "sleep 1000 & sleep 1000"}}
	heard := make(chan os.Signal, 1)
	time.AfterFunc(50*time.Millisecond, func() { heard <- syscall.SIGTERM })
	if _, err := e.discoverUntil(heard); err == nil || !strings.Contains(err.Error(), "was broken off: signal 15") {
		t.Fatal(err)
	}
	e.Script = "echo a"
	for deadline := time.Now().Add(20 * time.Second); ; { // another process's end cannot be waited for otherwise
		if _, err := e.discover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(e.groups) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("processes of the groups %v are there still", e.groups)
		}
	}
}

// Many machines have their own name at a loopback address, in a form that os.Hostname does not give.
func TestANameOfThisMachineDoesNotPutTheSchedulerOnLoopback(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if own, err := iface.Towards(name); err != nil || !iface.IsLoopback(own) {
		t.Skipf("%s is at %s (%v) here", name, own, err)
	}
	j := maker{Options: Options{Env: map[string]string{}}, hostname: "other", workers: []Worker{{Host: name}}}
	if own, err := j.ownAddress(); err == nil && iface.IsLoopback(own) {
		t.Errorf("the others are told %s", own)
	}
}

func TestHostsThatCannotBeAreNamed(t *testing.T) {
	for text, want := range map[string]string{
		"a:0":          `"0" slots of a host`,
		"a:x":          `"x" slots of a host`,
		"a,,b":         `"" is not the name of a host`,
		"-oProxy=x:1":  "is not the name of a host",
		"a;rm:1":       "is not the name of a host",
		"a:1000000000": "allowed are 1 to 16384",
	} {
		if _, err := ParseHosts(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := ParseHostFile(strings.NewReader("a\nb slots=no\n")); err == nil || !strings.Contains(err.Error(), `line 2: "no" slots`) {
		t.Error(err)
	}
	if _, err := ParseHostFile(strings.NewReader("# nobody\n")); err == nil {
		t.Error("an empty file")
	}
}

func TestServersAreReadAsHostsAre(t *testing.T) {
	m := maker{Options: Options{Servers: " host3, host4:7001 ,[::1]", Env: map[string]string{}}}
	if err := m.placeServers(); err != nil {
		t.Fatal(err)
	}
	if want := []serverPlace{{"host3", ""}, {"host4", "7001"}, {"::1", ""}}; !slices.Equal(m.servers, want) {
		t.Errorf("%q, want %q", m.servers, want)
	}
}

func TestRanksFillHostsInOrder(t *testing.T) {
	workers, err := Assign([]Host{{"a", 2}, {"b", 1}, {"c", 3}}, 5)
	if err != nil {
		t.Fatal(err)
	}
	want := []Worker{
		{"a", 0, 5, 0, 2, 0, 3}, {"a", 1, 5, 1, 2, 0, 2},
		{"b", 2, 5, 0, 1, 1, 3},
		{"c", 3, 5, 0, 2, 2, 3}, {"c", 4, 5, 1, 2, 1, 2},
	}
	if !slices.Equal(workers, want) {
		t.Fatalf("%+v", workers)
	}
	if workers, err := Assign([]Host{{"a", 2}, {"b", 2}}, 1); err != nil || len(workers) != 1 || workers[0].CrossSize != 1 {
		t.Fatal("a host without a rank counts:", workers, err)
	}
	if workers, err := Assign([]Host{{"a", 2}, {"b", 2}}, 0); err != nil || len(workers) != 4 {
		t.Fatal(workers, err)
	}
	if _, err := Assign([]Host{{"a", 2}}, 3); err == nil || !strings.Contains(err.Error(), "3 processes do not fit on hosts with 2 slots") {
		t.Fatal(err)
	}
}

func TestWorkerKnowsItsPlaceUnderBothNames(t *testing.T) {
	env := Worker{"h", 3, 5, 0, 2, 2, 3}.Env()
	for name, want := range map[string]string{"RANK": "3", "SIZE": "5", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "CROSS_RANK": "2", "CROSS_SIZE": "3"} {
		if env["PACELINE_"+name] != want || env["HOROVOD_"+name] != want {
			t.Error(name, env)
		}
	}
	for name, want := range map[string]string{"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} {
		if env[name] != want {
			t.Error(name, env)
		}
	}
	if env["HOROVOD_HOSTNAME"] != "h" || env["PACELINE_HOST"] != "h" {
		t.Error(env)
	}
}

// TestLocalRanksFollowSlots: ranks are in another order where a process has taken the slot of one that was lost, because rank 0 has the state.
func TestLocalRanksFollowSlots(t *testing.T) {
	members := []fleet.Place{{Process: 1, Host: "a", Slot: 1}, {Process: 2, Host: "a", Slot: 2}, {Process: 4, Host: "a", Slot: 0}, {Process: 3, Host: "b", Slot: 1}}
	want := []Worker{{"a", 0, 4, 1, 3, 0, 1}, {"a", 1, 4, 2, 3, 0, 1}, {"a", 2, 4, 0, 3, 0, 2}, {"b", 3, 4, 0, 1, 1, 2}}
	if got := assign(members); !slices.Equal(got, want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
}

func TestOnlyVariablesThatMeanTheSameElsewhereAreExported(t *testing.T) {
	got := Portable(map[string]string{"PATH": "p", "PYTHONPATH": "q", "HOME": "/", "SSH_AUTH_SOCK": "s", "BASH_FUNC_x%%": "f", "HOROVOD_X": "1", "2BAD": "", "HOSTNAME": "me", "UID": "0"})
	if fmt.Sprint(Lines(got)) != "[HOROVOD_X=1 PATH=p PYTHONPATH=q]" {
		t.Fatal(got)
	}
}

func TestRemoteShellCommandLines(t *testing.T) {
	for _, c := range []struct {
		shell Shell
		want  string
	}{
		{Shell{Template: "ssh", Timeout: 3e9}, "[ssh -o BatchMode=yes -o ConnectTimeout=3 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 h]"},
		{Shell{Template: "/usr/bin/ssh -4", Port: 22, Identity: "key", Timeout: 3e9}, "[/usr/bin/ssh -4 -o BatchMode=yes -o ConnectTimeout=3 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 -p 22 -i key h]"},
		{Shell{Template: "ip netns exec {host}"}, "[ip netns exec h]"},
		{Shell{Template: `env 'A=b c' X="{host}"`}, "[env A=b c X=h]"},
	} {
		if got, err := c.shell.For("h"); err != nil || fmt.Sprint(got) != c.want {
			t.Error(got, err)
		}
	}
	for _, bad := range []string{"", "sh 'x"} {
		if _, err := (Shell{Template: bad}).For("h"); err == nil {
			t.Error(bad)
		}
	}
}

// MASTER_PORT is free until rank 0 listens there: a port that the system gives to whoever asks for any may be another job's by then.
func TestTheStoresPortIsNoneThatTheSystemGives(t *testing.T) {
	for range 20 {
		port, err := freePort()
		if err != nil || port < firstPort || port >= firstPort+ports {
			t.Fatal(port, err)
		}
	}
}
