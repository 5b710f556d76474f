package jobtest_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// The tests in this file start the nodes of a job as processes of their own (this test's binary again)
// and kill them.

// processRole says what a process that a test starts is: a worker that trains until it fails, a
// dedicated server, or a scheduler.
const processRole = "PACELINE_TEST_ROLE"

// listenAt is where a scheduler listens.
const listenAt = "PACELINE_TEST_LISTEN"

// stepsPerLine is after how many steps a worker says so, and begins to use another tensor.
const stepsPerLine = 20

// processMain is the main function of such a process. It ends with its standard input, so that none
// survives the test.
func processMain(role string) int {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	if err := runProcess(role); err != nil {
		fmt.Println("error:", err)
		return 3
	}
	return 0
}

func runProcess(role string) error {
	s, err := processSettings(role)
	if err != nil {
		return err
	}
	switch role {
	case "scheduler":
		sched, err := node.StartScheduler(s, os.Getenv(listenAt), zap.NewNop())
		if err != nil {
			return err
		}
		fmt.Println("listens", sched.Address)
		select {}
	case "server":
		return node.RunServer(context.Background(), s, "", zap.NewNop())
	}
	w, err := node.StartWorker(context.Background(), s, node.Options{Log: zap.NewNop()})
	if err != nil {
		return err
	}
	defer w.Shutdown()
	return train(w)
}

func processSettings(role string) (settings.Settings, error) {
	env := map[string]string{"PACELINE_ROLE": role}
	for _, v := range os.Environ() {
		if name, value, _ := strings.Cut(v, "="); strings.HasPrefix(name, "PACELINE_") && !strings.HasPrefix(name, "PACELINE_TEST_") {
			env[name] = value
		}
	}
	if role == "scheduler" {
		env["PACELINE_SCHEDULER"] = "127.0.0.1:1" // it is told where to listen instead
	}
	s, _, err := settings.FromEnv(env)
	if err != nil {
		return s, err
	}
	_, err = s.Complete()
	return s, err
}

// train sums for ever, and checks each sum.
func train(w *node.Worker) error {
	j := &job{workers: make([]*node.Worker, w.Settings.Size)}
	rank := w.Settings.Rank
	j.workers[rank] = w
	for step := 1; ; step++ {
		for _, n := range []int{10, 100000} {
			if err := j.sums(rank, fmt.Sprint("gradient ", step/stepsPerLine, " ", n), n); err != nil {
				return err
			}
		}
		if step%stepsPerLine == 0 {
			fmt.Println("step", step)
		}
	}
}

// process is one of the job's processes.
type process struct {
	t     testing.TB
	name  string
	cmd   *exec.Cmd
	lines chan string // of its standard output, closed at its end
	ended chan struct{}
}

// startProcess starts this test's binary with a role, behind a command such as `ip netns exec NAME`.
func startProcess(t testing.TB, before []string, role string, env ...string) *process {
	t.Helper()
	args := append(append([]string(nil), before...), os.Args[0])
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(append(os.Environ(), "PACELINE_JOB_SECRET="+testSecret, processRole+"="+role), env...)
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
	p := &process{t: t, name: fmt.Sprint(role, " ", env), cmd: cmd, lines: make(chan string, 10000), ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		for in := bufio.NewScanner(stdout); in.Scan(); {
			p.lines <- in.Text()
		}
		_ = cmd.Wait() // it was killed, or has said why it ends
		close(p.lines)
	}()
	t.Cleanup(func() {
		stdin.Close()
		cmd.Process.Kill()
		<-p.ended
	})
	return p
}

func (p *process) kill() {
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Error(err)
	}
	<-p.ended
}

// says waits for a line that begins with a word, and gives it back.
func (p *process) says(word string, within time.Duration) string {
	p.t.Helper()
	timeout := time.After(within)
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
			p.t.Fatalf("%s did not say %q within %v", p.name, word, within)
		}
	}
}

// fleet is a job of processes.
type fleet struct {
	t         testing.TB
	address   string // of the scheduler
	scheduler *process
	servers   []*process
	workers   []*process
}

func startFleet(t testing.TB, workers, servers int) *fleet {
	t.Helper()
	f := &fleet{t: t}
	f.scheduler = startProcess(t, nil, "scheduler", listenAt+"=127.0.0.1:0")
	f.address = strings.TrimPrefix(f.scheduler.says("listens", hang), "listens ")
	common := []string{"PACELINE_SCHEDULER=" + f.address, fmt.Sprint("PACELINE_SIZE=", workers), fmt.Sprint("PACELINE_NUM_SERVERS=", servers)}
	if servers > 0 {
		common = append(common, "PACELINE_SERVERS=dedicated")
	}
	for range servers {
		f.servers = append(f.servers, startProcess(t, nil, "server", common...))
	}
	for rank := range workers {
		f.workers = append(f.workers, startProcess(t, nil, "worker", append(common, fmt.Sprint("PACELINE_RANK=", rank))...))
	}
	f.steps()
	return f
}

// steps waits until every worker has gone on a while.
func (f *fleet) steps() {
	f.t.Helper()
	for _, w := range f.workers {
		w.says("step", hang)
	}
}

// fails waits until all workers that are left have ended with an error that names a node.
func (f *fleet) fails(within time.Duration, node string) {
	f.t.Helper()
	var wg sync.WaitGroup
	for rank, w := range f.workers {
		if w != nil {
			wg.Go(func() {
				if err := w.failure(within); !strings.Contains(err, worker.ErrPeerLost.Error()) || !strings.Contains(err, node) {
					f.t.Errorf("rank %d: %q, want %s lost", rank, err, node)
				}
			})
		}
	}
	wg.Wait()
}

// failure is the error with which the process ends.
func (p *process) failure(within time.Duration) string {
	timeout := time.After(within)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok || strings.HasPrefix(line, "error:") {
				return line
			}
		case <-timeout:
			return fmt.Sprintf("nothing within %v", within)
		}
	}
}

func TestAKilledWorkerIsAnErrorOnEverySurvivorWithinSeconds(t *testing.T) {
	for _, servers := range []int{0, 2} {
		for killed := range 3 {
			if race && killed != servers/2 {
				continue
			}
			t.Run(fmt.Sprintf("rank %d with %d dedicated servers", killed, servers), func(t *testing.T) {
				f := startFleet(t, 3, servers)
				f.workers[killed].kill()
				f.workers[killed] = nil
				f.fails(5*time.Second, fmt.Sprintf("worker %d", killed))
			})
		}
	}
}

func TestAKilledServerIsAnErrorOnEveryWorkerWithinSeconds(t *testing.T) {
	f := startFleet(t, 3, 2)
	f.servers[1].kill()
	f.fails(5*time.Second, "server ")
}

func TestAKilledSchedulerIsNotNoticed(t *testing.T) {
	f := startFleet(t, 3, 0)
	for range 3 {
		f.scheduler.kill()
		f.scheduler = startProcess(t, nil, "scheduler", listenAt+"="+f.address)
		f.scheduler.says("listens", hang)
		for range 3 { // with new tensors
			f.steps()
		}
	}
}
