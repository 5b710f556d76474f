package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestOtherHostsGetWhatTheyNeedAndNoSecretOnACommandLine(t *testing.T) {
	c := command(t, "run", "-H", "hostA:1,hostB:2", "--network-interfaces", "lo", "--remote-shell", "env -i PATH=/usr/bin:/bin ON={host}",
		"sh", "-c", `echo "$ON $HOROVOD_HOSTNAME $PACELINE_RANK $PACELINE_LOCAL_RANK/$PACELINE_LOCAL_SIZE $PACELINE_CROSS_RANK/$PACELINE_CROSS_SIZE $HOROVOD_FOO $PYTHONPATH"
printf %s "$PACELINE_JOB_SECRET" | grep -salf - /proc/[0-9]*/cmdline
pwd`)
	c.Env = append(c.Env, "HOROVOD_FOO=a 'b'", "PYTHONPATH=/some/where")
	r := run(t, c)
	r.check(t, 0, "", "")
	for rank, want := range []string{"hostA hostA 0 0/1 0/2", "hostB hostB 1 0/2 1/2", "hostB hostB 2 1/2 0/1"} {
		for _, line := range []string{want + " a 'b' /some/where", c.Dir} {
			if !strings.Contains(r.stdout, fmt.Sprintf("[%d]<stdout>:%s\n", rank, line)) {
				t.Errorf("rank %d: no %q in %s", rank, line, r.stdout)
			}
		}
	}
	if strings.Contains(r.stdout, "cmdline") {
		t.Error("the secret is on a command line:", r.stdout)
	}
}

func TestAHostThatCannotBeReachedIsNamed(t *testing.T) {
	paceline(t, "run", "-H", "hostA:1", "--network-interfaces", "lo", "--remote-shell", "sh -c 'echo $0: no route >&2; exit 255' {host}", "true").
		check(t, 255, "", "hostA: no route")
}

// TestJobOverNetworkNamespaces has hosts of its own: namespaces joined by a bridge.
func TestJobOverNetworkNamespaces(t *testing.T) {
	hosts := namespaces(t, 3)
	c := command(t, "run", "-H", hosts[0]+":1,"+hosts[1]+":1", "--servers", hosts[2]+":7001", "--network-interfaces", "10.213.77.254", "--remote-shell", "ip netns exec {host}",
		"sh", "-c", `export PACELINE_TEST_COMMAND=1
"$SELF" status
ip -o -4 address show | grep -o '10[.]213[.]77[.][0-9]*/'
until python3 -c 'import socket; socket.create_connection(("10.213.77.3", 7001), 5)'; do sleep 0.1; done 2>/dev/null
echo "$PACELINE_SERVERS $PACELINE_NUM_SERVERS"`)
	// The server is started under the command's name, which the tests' binary does not have.
	bin := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\nexport PACELINE_TEST_COMMAND=1\nexec %s \"$@\"\n", c.Path)
	if err := os.WriteFile(bin+"/paceline", []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	c.Env = append(c.Env, "PATH="+bin+":"+os.Getenv("PATH"))
	r := run(t, c)
	if r.code != 0 || strings.Contains(r.stderr, "[0]") || strings.Contains(r.stderr, "[1]") { // the server logs unauthenticated peers at its port
		t.Fatalf("%+v", r)
	}
	for _, want := range []string{
		"[0]<stdout>:scheduler 10.213.77.254:", "[1]<stdout>:scheduler 10.213.77.254:", "[0]<stdout>:10.213.77.1/", "[1]<stdout>:10.213.77.2/", "[1]<stdout>:dedicated 1\n",
	} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in %s", want, r.stdout)
		}
	}
}

// namespaces makes network namespaces with the addresses 10.213.77.1 and up, on a bridge that is
// 10.213.77.254 here, and gives their names.
func namespaces(t *testing.T, n int) []string {
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need the ip command (package iproute2)")
	}
	tag := fmt.Sprintf("pl%d", os.Getpid()%10000)
	ip := func(args string) {
		t.Helper()
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %s", args, out)
		}
	}
	bridge := tag + "b"
	if out, err := exec.Command("ip", "link", "add", bridge, "type", "bridge").CombinedOutput(); err != nil {
		t.Skipf("no network namespaces here: %s", out)
	}
	t.Cleanup(func() { ip("link del " + bridge) })
	ip("address add 10.213.77.254/24 dev " + bridge)
	ip("link set " + bridge + " up")
	var names []string
	for i := range n {
		name, outer, inner := fmt.Sprintf("%sn%d", tag, i), fmt.Sprintf("%so%d", tag, i), fmt.Sprintf("%si%d", tag, i)
		ip("netns add " + name)
		t.Cleanup(func() { ip("netns del " + name) })
		ip("link add " + outer + " type veth peer name " + inner)
		ip("link set " + inner + " netns " + name)
		ip("link set " + outer + " master " + bridge + " up")
		ip(fmt.Sprintf("-n %s address add 10.213.77.%d/24 dev %s", name, i+1, inner))
		ip("-n " + name + " link set " + inner + " up")
		ip("-n " + name + " link set lo up")
		names = append(names, name)
	}
	return names
}
