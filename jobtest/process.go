package jobtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/shm"
)

// The nodes of a job as processes of their own: the test's binary, started again.

// processRole names the variable with the role of a process that a test starts: a worker that trains until it fails, a
// dedicated server, or a scheduler.
const processRole = "PACELINE_TEST_ROLE"

// listenAt names the variable with a scheduler's address.
const listenAt = "PACELINE_TEST_LISTEN"

// phased names the variable with which nodes say where they are ("at init"), and wait there for Process.Release. Workers then pass
// init, one sum, a join and a shutdown in place of training.
const phased = "PACELINE_TEST_PHASED"

// stepsPerLine is the number of steps after which a worker prints a line and uses another tensor.
const stepsPerLine = 20

// ActAsProcess comes first in TestMain of a package whose tests start processes: in such a process it does not return.
func ActAsProcess() {
	if role := os.Getenv(processRole); role != "" {
		os.Exit(processMain(role))
	}
}

// processMain is the main function of such a process. It ends with its standard input, so that none
// survives the test.
func processMain(role string) int {
	released := make(chan string)
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			released <- in.Text()
		}
		os.Exit(1)
	}()
	reach := func(phase string) {
		if os.Getenv(phased) != "" {
			fmt.Println("at", phase)
			<-released
		}
	}
	if err := runProcess(role, reach); err != nil {
		fmt.Println("error:", err)
		return 3
	}
	return 0
}

func runProcess(role string, reach func(phase string)) error {
	s, err := processSettings(role)
	if err != nil {
		return err
	}
	switch role {
	case "scheduler":
		sched, err := node.StartScheduler(s, os.Getenv(listenAt), node.Options{Log: processLog(role, s.Rank)})
		if err != nil {
			return err
		}
		fmt.Println("listens", sched.Address)
		select {}
	case "server":
		reach("init")
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		return node.RunServer(ctx, s, "", node.Options{Log: processLog(role, s.Rank)})
	}
	o := node.Options{Log: processLog(role, s.Rank)}
	if o.Arena, err = shm.NewArena(); err != nil {
		return err
	}
	if s.EmbedScheduler != "" {
		sched, err := node.StartScheduler(s, s.EmbedScheduler, o)
		if err != nil {
			return err
		}
		o.Scheduler = sched.Address
	}
	reach("init")
	w, err := node.StartWorker(context.Background(), s, o)
	if err != nil {
		return err
	}
	if os.Getenv(phased) != "" {
		return pass(w, reach)
	}
	defer w.Shutdown()
	return train(w)
}

// processLog is silent, but for those who look for a fault with PACELINE_LOG_LEVEL.
func processLog(role string, rank int) *zap.Logger {
	if level := os.Getenv("PACELINE_LOG_LEVEL"); level != "" {
		if log, err := node.Logger(level, role, rank); err == nil {
			return log
		}
	}
	return zap.NewNop()
}

// pass is the rest of a worker's life in phases.
func pass(w *node.Worker, reach func(phase string)) error {
	rank := w.Settings.Rank
	j := &Job{Workers: make([]*node.Worker, w.Settings.Size)}
	j.Workers[rank] = w
	if err := j.Sums(rank, "x", 100000); err != nil {
		return err
	}
	reach("join")
	if _, err := j.Join(rank); err != nil {
		return err
	}
	reach("shutdown")
	w.Shutdown()
	return nil
}

func processSettings(role string) (settings.Settings, error) {
	env := map[string]string{"PACELINE_ROLE": role}
	for _, v := range os.Environ() {
		if name, value, _ := strings.Cut(v, "="); (name == "MASTER_ADDR" || strings.HasPrefix(name, "PACELINE_")) && !strings.HasPrefix(name, "PACELINE_TEST_") {
			env[name] = value
		}
	}
	if role == "scheduler" {
		env["PACELINE_SCHEDULER"] = "127.0.0.1:1" // its address is in listenAt
	}
	s, _, err := settings.FromEnv(env)
	if err != nil {
		return s, err
	}
	err = s.Complete()
	return s, err
}

// train sums for ever, and checks each sum; or it plays a rank of Means.
func train(w *node.Worker) error {
	j := &Job{Workers: make([]*node.Worker, w.Settings.Size)}
	rank := w.Settings.Rank
	j.Workers[rank] = w
	if text := os.Getenv(meansOf); text != "" {
		return trainMeans(j, rank, text)
	}
	for step := 1; ; step++ {
		for _, n := range []int{10, 100000} {
			if err := j.Sums(rank, fmt.Sprint("gradient ", step/stepsPerLine, " ", n), n); err != nil {
				return err
			}
		}
		if step%stepsPerLine == 0 {
			fmt.Println("step", step)
		}
	}
}

// Process is one of the job's processes.
type Process struct {
	t     testing.TB
	name  string
	cmd   *exec.Cmd
	stdin io.Writer
	lines chan string // of its standard output, closed at its end
	ended chan struct{}
}

// startProcess starts this test's binary with a role, behind a command such as `ip netns exec NAME`.
func startProcess(t testing.TB, before []string, role string, env ...string) *Process {
	t.Helper()
	args := append(append([]string(nil), before...), os.Args[0])
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(append(os.Environ(), "PACELINE_JOB_SECRET="+Secret, processRole+"="+role), env...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &Process{t: t, name: fmt.Sprint(role, " ", env), cmd: cmd, stdin: stdin, lines: make(chan string, 10000), ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		for in := bufio.NewScanner(stdout); in.Scan(); {
			p.lines <- in.Text()
		}
		_ = cmd.Wait() // it was killed, or has printed its error
		close(p.lines)
	}()
	t.Cleanup(func() {
		stdin.Close()
		cmd.Process.Kill()
		<-p.ended
	})
	return p
}

// Kill ends the process at once, without a goodbye.
func (p *Process) Kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

// Release lets a process go on that has said in which phase it is.
func (p *Process) Release() {
	if _, err := fmt.Fprintln(p.stdin); err != nil {
		p.t.Error(err)
	}
}

// Stop stops the process until Continue. It keeps its connections. It waits until no thread runs: on a crowded machine some go
// on until another one has seen the signal.
func (p *Process) Stop() {
	p.signal(syscall.SIGSTOP)
	for p.runs() {
		time.Sleep(time.Millisecond)
	}
}

// runs reports whether a thread of the process is neither stopped nor over.
func (p *Process) runs() bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
	for _, t := range threads {
		stat, err := os.ReadFile(t)
		if _, after, ok := strings.Cut(string(stat), ") "); err == nil && ok && !strings.ContainsRune("TZX", rune(after[0])) {
			return true
		}
	}
	return false
}

// Terminate tells the process to end.
func (p *Process) Terminate() { p.signal(syscall.SIGTERM) }

// Continue ends Stop.
func (p *Process) Continue() { p.signal(syscall.SIGCONT) }

func (p *Process) signal(s syscall.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Error(err)
	}
}

// Says waits for a line that begins with a word, and returns it.
func (p *Process) Says(word string) string {
	p.t.Helper()
	timeout := time.After(Hang)
	for {
		select {
		case line, ok := <-p.lines:
			switch {
			case strings.HasPrefix(line, word):
				return line
			case !ok || strings.HasPrefix(line, "error:"):
				p.t.Fatalf("%s ended: %s", p.name, line)
			}
		case <-timeout:
			p.t.Fatalf("%s did not say %q within %v", p.name, word, Hang)
		}
	}
}

// Line is the next line that the process prints; not ok at its end.
func (p *Process) Line() (line string, ok bool) {
	p.t.Helper()
	select {
	case line, ok = <-p.lines:
		return line, ok
	case <-time.After(Hang):
		p.t.Fatalf("%s said nothing within %v", p.name, Hang)
		return "", false
	}
}

// Backlog is how many lines the process has printed that Line has not returned.
func (p *Process) Backlog() int { return len(p.lines) }

// Failure is the error that the process ends with, "" where it ends well.
func (p *Process) Failure() string {
	timeout := time.After(Hang)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok || strings.HasPrefix(line, "error:") {
				return line
			}
		case <-timeout:
			return fmt.Sprintf("nothing within %v", Hang)
		}
	}
}
