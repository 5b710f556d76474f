package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/cmd/paceline/watch"
)

// place gives commands a directory for run files that they share.
type place struct {
	t   *testing.T
	dir string
}

func newPlace(t *testing.T) place { return place{t, t.TempDir()} }

func (h place) command(args ...string) *exec.Cmd {
	c := command(h.t, args...)
	c.Env = append(c.Env, "XDG_RUNTIME_DIR="+h.dir, "TMPDIR="+h.dir, "PACELINE_SCHEDULER=")
	return c
}

func (h place) run(args ...string) result {
	h.t.Helper()
	return run(h.t, h.command(args...))
}

// job starts `paceline run` with a command that says when it runs and lasts until the test ends, also where its launcher does not.
func (h place) job(args ...string) *exec.Cmd {
	h.t.Helper()
	c := h.command(append([]string{"run"}, args...)...)
	ready, hold := fifo(h.t, c, "ready"), fifo(h.t, c, "hold")
	held, err := os.OpenFile(hold, os.O_RDWR, 0)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { held.Close() })
	c.Args = append(c.Args, "sh", "-c", "exec < hold; echo > ready; read _")
	h.start(c)
	os.ReadFile(ready)
	return c
}

func (h place) start(c *exec.Cmd) {
	h.t.Helper()
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		c.Process.Signal(syscall.SIGTERM)
		c.Wait()
	})
}

func (h place) files() int {
	files, _ := filepath.Glob(filepath.Join(h.dir, "paceline", "job-*"))
	return len(files)
}

func TestStatusFindsTheJobsOfThisUser(t *testing.T) {
	h := newPlace(t)
	if r := h.run("status"); r.code != 1 || !strings.Contains(r.stderr, "no job of this user runs on this machine (looked in ") {
		t.Fatalf("%+v", r)
	}
	first := h.job("-np", "1")
	id := fmt.Sprint(first.Process.Pid)
	for _, args := range [][]string{{"status"}, {"status", id}, {"top"}} {
		h.run(args...).check(t, 0, "job "+id+": "+first.Path+" run -np 1 sh", "")
		h.run(args...).check(t, 0, ": forming, up ", "")
	}
	second := h.job("-np", "2")
	r := h.run("status", "--timeout", "1m") // a crowded machine may not answer within that of a list
	r.check(t, 0, "job ", "")
	for _, j := range []*exec.Cmd{first, second} {
		if !regexp.MustCompile(fmt.Sprintf(`(?m)^%d +forming`, j.Process.Pid)).MatchString(r.stdout) {
			t.Errorf("no job %d in %s", j.Process.Pid, r.stdout)
		}
	}
	r = h.run("status", "--json", "--timeout", "1m")
	var views []watch.View
	if err := json.Unmarshal([]byte(r.stdout), &views); err != nil || len(views) != 2 || views[0].State != "forming" {
		t.Fatalf("%+v, %v", r, err)
	}
	if strings.Contains(r.stdout, "SECRET") {
		t.Error("the secret is shown", r.stdout)
	}
	var one watch.View
	if r := h.run("status", id, "--json"); json.Unmarshal([]byte(r.stdout), &one) != nil || fmt.Sprint(one.ID) != id {
		t.Fatalf("%+v", r)
	}
	for args, want := range map[string]string{
		"servers":                           "2 jobs of this user run on this machine: name one",
		"servers " + id:                     "the job has no servers yet: it waits for ",
		"status 1":                          "no job 1 of this user runs on this machine; paceline status lists those that do",
		"status one":                        `unexpected argument "one"`,
		"status " + id + " 2":               `unexpected argument "2"`,
		"status --timeout 0s":               "--timeout 0s: allowed is a time above 0",
		"status --scheduler 127.0.0.1":      `--scheduler "127.0.0.1": allowed is host:port`,
		"top --scheduler 127.0.0.1:1 " + id: "by its number or by --scheduler, not by both",
		"status --scheduler 127.0.0.1:1 --timeout 1s": "connection refused",
	} {
		if r := h.run(strings.Fields(args)...); r.code != 1 || !strings.Contains(r.stderr, want) {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

// TestAJobThatDoesNotAnswerHasARowOfWhatIsKnown, and holds up no other for the time that one alone is given.
func TestAJobThatDoesNotAnswerHasARowOfWhatIsKnown(t *testing.T) {
	h := newPlace(t)
	h.job("-np", "1")
	stopped := h.job("-np", "1").Process
	stopped.Signal(syscall.SIGSTOP)
	t.Cleanup(func() { stopped.Signal(syscall.SIGCONT) })
	r := h.run("status")
	if row := fmt.Sprintf(`(?m)^%d +no answer +- +- +- +[0-9ms]+ +\S+ run -np 1 sh`, stopped.Pid); r.code != 0 || !regexp.MustCompile(row).MatchString(r.stdout) {
		t.Errorf("%+v", r)
	}
	r = h.run("status", "--timeout", "500ms", strconv.Itoa(stopped.Pid))
	if want := fmt.Sprintf(`^paceline status: job %d, which began [0-9ms]+ ago \(\S+ run -np 1 sh.*\), does not answer: `, stopped.Pid); r.code != 1 || !regexp.MustCompile(want).MatchString(r.stderr) {
		t.Errorf("%+v", r)
	}
	for _, c := range []struct {
		given bool
		jobs  int
		want  time.Duration
	}{{false, 1, 5 * time.Second}, {false, 2, time.Second}, {true, 2, 5 * time.Second}} {
		j := jobChoice{timeout: 5 * time.Second, given: func() bool { return c.given }}
		if got := j.patience(c.jobs); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// TestAJobWhoseSecretIsNoTextIsFound: the file with its secret is published, not the secret.
func TestAJobWhoseSecretIsNoTextIsFound(t *testing.T) {
	h := newPlace(t)
	file := filepath.Join(h.dir, "secret")
	if err := os.WriteFile(file, bytes.Repeat([]byte{0xff}, 32), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	c := h.command("scheduler", "--listen", address)
	c.Env = append(c.Env, "PACELINE_JOB_SECRET_FILE="+file)
	h.start(c)
	for until := time.Now().Add(time.Minute); h.files() == 0 && time.Now().Before(until); {
		time.Sleep(10 * time.Millisecond) // until another process listens
	}
	id := fmt.Sprint(c.Process.Pid)
	h.run("status", "--timeout", "1m").check(t, 0, "job "+id+": ", "")
	h.run("top", id).check(t, 0, ": forming, up ", "")
	if r := h.run("servers", id); !strings.Contains(r.stderr, "the job has no servers yet") {
		t.Errorf("%+v", r)
	}
}

// TestAJobThatWasKilledIsNotListed, and its file is removed.
func TestAJobThatWasKilledIsNotListed(t *testing.T) {
	h := newPlace(t)
	j := h.job("-np", "1")
	if h.files() != 1 {
		t.Fatal(h.files())
	}
	j.Process.Kill()
	j.Wait()
	if r := h.run("status"); r.code != 1 || !strings.Contains(r.stderr, "no job of this user") || h.files() != 0 {
		t.Fatalf("%+v %d", r, h.files())
	}
	if r := h.run("run", "true"); r.code != 0 || h.files() != 0 {
		t.Fatalf("%+v %d", r, h.files())
	}
}

func TestADirectoryThatOthersCanWriteToIsRefused(t *testing.T) {
	h := newPlace(t)
	h.job("-np", "1")
	if err := os.Chmod(filepath.Join(h.dir, "paceline"), 0o777); err != nil {
		t.Fatal(err)
	}
	if r := h.run("status"); r.code != 1 || !strings.Contains(r.stderr, "nobody else can enter") {
		t.Fatalf("%+v", r)
	}
	h.run("run", "-np", "1", "echo", "hello").check(t, 0, "hello", "") // it runs all the same
}

// TestStatusShowsHowFarRanksAre of a job that exchanges tensors: the benchmark, as the ranks of a job.
func TestStatusShowsHowFarRanksAre(t *testing.T) {
	h := newPlace(t)
	sizes := strings.Repeat("64KiB,", 999) + "64KiB" // longer than the test
	c := h.command("run", "-np", "2", "sh", "-c", `PACELINE_TEST_COMMAND=1 exec "$SELF" bench allreduce --duration 1h --sizes `+sizes)
	h.start(c)
	until := time.Now().Add(time.Minute)
	for {
		var views []watch.View
		r := h.run("status", "--json")
		if err := json.Unmarshal([]byte(r.stdout), &views); err == nil && len(views) == 1 && len(views[0].Ranks) == 2 {
			if rank := views[0].Ranks[1]; rank.Rank == 1 && rank.Iteration > 0 && rank.Rate > 0 && rank.Sent > 0 && rank.Average > 0 {
				break
			}
		}
		if time.Now().After(until) {
			t.Fatalf("%+v", r)
		}
	}
	h.run("status").check(t, 0, "rank       host", "")
	var servers []watch.Server
	if r := h.run("servers", "--json", "--timeout", "1m"); json.Unmarshal([]byte(r.stdout), &servers) != nil || len(servers) != 2 || servers[0].Keys+servers[1].Keys == 0 || servers[0].Load+servers[1].Load == 0 {
		t.Fatalf("%+v", r)
	}
	h.run("servers", "--timeout", "1m").check(t, 0, "worker 1", "")
}

// TestASignalEndsARankThatMeasures, however long that would take.
func TestASignalEndsARankThatMeasures(t *testing.T) {
	h := newPlace(t)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		c := h.command("bench", "allreduce", "--sizes", "4KiB", "--duration", "1ms", "--idle", "1h")
		c.Env = append(c.Env, "PACELINE_RANK=0", "PACELINE_SIZE=1")
		c.Stderr = os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		hangs := time.AfterFunc(time.Minute, func() { c.Process.Kill() })
		for until := time.Now().Add(time.Minute); time.Now().Before(until); {
			var views []watch.View
			r := h.run("status", "--json") // measures in another process
			if json.Unmarshal([]byte(r.stdout), &views) == nil && len(views) == 1 && len(views[0].Ranks) == 1 && views[0].Ranks[0].Iteration > 0 {
				break
			}
		}
		c.Process.Signal(sig)
		err := c.Wait()
		hangs.Stop()
		if c.ProcessState.Sys().(syscall.WaitStatus).Signal() != sig {
			t.Error(sig, err)
		}
	}
}

// TestTopDrawsUntilQOrCtrlC in a terminal, which is as it was afterwards.
func TestTopDrawsUntilQOrCtrlC(t *testing.T) {
	h := newPlace(t)
	j := h.job("-np", "1")
	for _, key := range []string{"q", "\x03"} {
		master, terminal := terminal(t)
		before, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
		if err != nil {
			t.Fatal(err)
		}
		c := h.command("top")
		c.Stdin, c.Stdout, c.Stderr = terminal, terminal, os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		wantDrawn(t, master, fmt.Sprintf("job %d: ", j.Process.Pid), "\x1b[H") // and once more
		fmt.Fprint(master, key)
		if err := c.Wait(); err != nil {
			t.Fatal(err)
		}
		wantDrawn(t, master, leaveScreen)
		if after, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS); err != nil || *after != *before {
			t.Errorf("the terminal was %+v and is %+v, %v", before, after, err)
		}
	}
}

// TestTopWritesALineOfJSONForEachLook, on standard output or to a file, until a signal or the end of the job.
func TestTopWritesALineOfJSONForEachLook(t *testing.T) {
	h := newPlace(t)
	j := h.job("-np", "1")
	look := func(lines *json.Decoder) snapshot {
		t.Helper()
		var s snapshot
		if err := lines.Decode(&s); err != nil || s.ID != j.Process.Pid || s.State != "forming" || s.Time.IsZero() {
			t.Fatalf("%+v, %v", s, err)
		}
		return s
	}
	top := func(args ...string) (c *exec.Cmd, stdout *bufio.Reader) {
		c = h.command(append([]string{"top"}, args...)...)
		pipe, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		h.start(c)
		late := time.AfterFunc(time.Minute, func() { c.Process.Signal(syscall.SIGQUIT) })
		t.Cleanup(func() { late.Stop() })
		return c, bufio.NewReader(pipe)
	}
	c, stdout := top("--json")
	line, err := stdout.ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	first := look(json.NewDecoder(bytes.NewReader(line))) // one line, one object
	if next := look(json.NewDecoder(stdout)); !next.Time.After(first.Time) {
		t.Error(first.Time, next.Time)
	}
	c.Process.Signal(syscall.SIGTERM)
	if err := c.Wait(); err != nil {
		t.Error(err)
	}

	c, stdout = top("--json=lines")
	text, err := stdout.ReadString('\n')
	if want := fmt.Sprintf("job %d: ", j.Process.Pid); err != nil || !strings.HasPrefix(text, want) {
		t.Error(text, err)
	}
	j.Process.Kill()
	j.Wait()
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
	data, err := os.ReadFile(filepath.Join(c.Dir, "lines"))
	if err != nil {
		t.Fatal(err)
	}
	look(json.NewDecoder(bytes.NewReader(data)))
}

// TestDrainReportsAsJSON which server has left which job.
func TestDrainReportsAsJSON(t *testing.T) {
	h := newPlace(t)
	self := filepath.Join(t.TempDir(), "paceline") // by which the launcher starts servers
	if err := os.WriteFile(self, []byte("#!/bin/sh\nPACELINE_TEST_COMMAND=1 exec \"$SELF\" \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	c := h.command("run", "-np", "1", "--elastic", "--servers", "localhost,localhost", "paceline", "bench", "allreduce", "--duration", "1h", "--sizes", "64KiB")
	c.Env = append(c.Env, "PATH="+filepath.Dir(self)+":"+os.Getenv("PATH"))
	h.start(c)
	for until := time.Now().Add(time.Minute); ; {
		var servers []watch.Server
		r := h.run("servers", "--json", "--timeout", "1m")
		if json.Unmarshal([]byte(r.stdout), &servers) == nil && len(servers) == 2 {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("%+v", r)
		}
	}
	var result drained
	r := h.run("drain", "1", "--json")
	if err := json.Unmarshal([]byte(r.stdout), &result); err != nil || r.code != 0 || result.Server != "1" || result.Job != c.Process.Pid || result.Scheduler == "" || result.Seconds <= 0 {
		t.Fatalf("%+v: %+v, %v", r, result, err)
	}
	h.run("drain", "0", "--json").check(t, 1, "", "is the last server of the job that stays")
}

// terminal makes a pseudo-terminal.
func terminal(t *testing.T) (master, terminal *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no pseudo-terminals here:", err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	return master, terminal
}

// wantDrawn reads a terminal until the texts have come, one after the other.
func wantDrawn(t *testing.T, from *os.File, texts ...string) {
	t.Helper()
	late := time.AfterFunc(time.Minute, func() { from.Close() })
	defer late.Stop()
	var seen strings.Builder
	buffer := make([]byte, 4096)
	at := 0
	for _, text := range texts {
		for {
			if i := strings.Index(seen.String()[at:], text); i >= 0 {
				at += i + len(text)
				break
			}
			n, err := from.Read(buffer)
			if err != nil {
				t.Fatalf("%q was not drawn: %q, %v", text, seen.String(), err)
			}
			seen.Write(buffer[:n])
		}
	}
}
