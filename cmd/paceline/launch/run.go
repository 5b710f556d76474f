package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/paceline/paceline/cmd/paceline/watch"
	"github.com/paceline/paceline/internal/signals"
	"github.com/paceline/paceline/internal/ticks"
	"github.com/paceline/paceline/node"
)

// Run starts the job with its scheduler, and waits for its end. It detects errors of the options before it starts
// anything. The exit code is that of the first worker that failed.
func Run(o Options) (Report, error) {
	began := time.Now()
	j := &maker{Options: o, heard: make(chan os.Signal, 4)}
	defer signal.Stop(j.heard)
	signals.OutliveReaders()
	r, err := j.run()
	r.Command, r.Seconds = o.Command, time.Since(began).Seconds()
	return r, err
}

func (j *maker) run() (Report, error) {
	if j.Until != nil {
		go func() {
			_, _ = io.Copy(io.Discard, j.Until)
			j.heard <- syscall.SIGTERM
		}()
	}
	err := j.prepare()
	var cut interrupted
	if errors.As(err, &cut) {
		j.Say("%v", err)
		return Report{Code: cut.code(), Lost: []Failure{}, Failed: []Failure{}, Error: err.Error()}, nil
	}
	if err != nil {
		return Report{}, err
	}
	j.listen()
	address := j.settings.Scheduler
	var e *elastic
	launched := len(j.workers)
	if j.Elastic != nil {
		e, launched = newElastic(j), 0 // not known
	}
	var formed func() bool
	news := newInbox()
	if j.Scheduler == "" {
		sched, err := node.StartScheduler(j.settings, address, node.Options{Workers: launched, Beside: launched > 0 && len(j.away()) == 0, Seats: e.seats(), News: news.tell})
		if err != nil {
			return Report{}, err
		}
		formed = sched.Formed
		defer sched.Close()
		sched.Publish()
		address = sched.Address
		if e != nil {
			e.scheduler = sched
		}
	}
	maps.Copy(j.Env, map[string]string{"PACELINE_SCHEDULER": address, "PACELINE_JOB_SECRET": string(j.settings.JobSecret)})
	if e == nil {
		address, err := j.rendezvous()
		if err != nil {
			return Report{}, err
		}
		maps.Copy(j.Env, address)
	}
	maps.DeleteFunc(j.Env, func(name, _ string) bool { // of a launcher around us
		return strings.HasPrefix(name, "TORCHELASTIC_") || strings.HasPrefix(name, "PACELINE_ELASTIC_")
	})
	for _, name := range []string{"PACELINE_JOB_SECRET_FILE", "PACELINE_ROLE", "DMLC_ROLE", "PACELINE_PORT"} {
		delete(j.Env, name)
	}
	if j.Verbose {
		defer j.narrate(address)()
	}
	job, err := j.job(address)
	if err != nil {
		return Report{}, err
	}
	job.Formed, job.News = formed, news
	if e != nil {
		return e.runJob(job, j.heard)
	}
	return job.Run(j.heard), nil
}

// listen has signals of the user be heard. Before they end this process: it has started nothing.
func (j *maker) listen() { signal.Notify(j.heard, signals.Ending()...) }

// inbox is what the scheduler has told the launcher, in its order.
type inbox struct {
	come chan struct{} // has an element while there is some

	mu   sync.Mutex
	news []node.News
}

func newInbox() *inbox { return &inbox{come: make(chan struct{}, 1)} }

func (b *inbox) tell(n node.News) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.news = append(b.news, n)
	select {
	case b.come <- struct{}{}:
	default: // it has one
	}
}

// each takes all of it.
func (b *inbox) each(hear func(node.News)) {
	b.mu.Lock()
	news := b.news
	b.news = nil
	b.mu.Unlock()
	for _, n := range news {
		hear(n)
	}
}

// narrate says where the job is found, and from time to time how far it is, until the function that it returns is called.
func (j *maker) narrate(address string) (stop func()) {
	j.Say("the scheduler is at %s; `paceline status %d` shows the job", address, os.Getpid())
	ctx, cancel := context.WithCancel(context.Background())
	s := j.settings
	s.Scheduler = address
	var lines sync.WaitGroup
	lines.Go(func() {
		before := []watch.View{{}}
		ticks.Until(ctx.Done(), cmp.Or(j.Every, time.Minute), func(time.Time) {
			before = watch.Since(before, watch.Look(ctx, []watch.Target{{Settings: s}}, s.PeerTimeout))
			if ctx.Err() == nil {
				j.Say("%s", before[0].Line())
			}
		})
	})
	return func() { cancel(); lines.Wait() }
}

// job makes the processes.
func (j *maker) job(scheduler string) (*Job, error) {
	console := &Console{Stdout: os.Stdout, Stderr: os.Stderr, Timestamps: j.Timestamps}
	if j.Quiet {
		console.Stdout = os.Stderr
	}
	j.console = console
	job := &Job{Start: j.settings.StartTimeout, Peers: DefaultPeers, Stop: DefaultStop, Say: j.Say, Elastic: j.settings.Elastic}
	for _, s := range j.servers {
		command := []string{"paceline", "server", "--scheduler", scheduler}
		if s.port != "" {
			command = append(command, "--listen", ":"+s.port)
		}
		t, err := j.task("server", s.host, command, map[string]string{"PACELINE_HOST": s.host, "PACELINE_LAUNCHED": "1"}, 0)
		if err != nil {
			return nil, err
		}
		t.Stdout, t.Stderr = console.Stream("server "+s.host, false, nil), console.Stream("server "+s.host, true, nil)
		job.Servers = append(job.Servers, t)
	}
	workers := j.workers
	if j.Elastic != nil {
		workers = nil // which are made as they start
	}
	for _, w := range workers {
		t, err := j.task(fmt.Sprintf("rank %d", w.Rank), w.Host, j.Command, w.Env(), w.LocalSize)
		if err != nil {
			return nil, err
		}
		if err := j.streams(console, t, w); err != nil {
			return nil, err
		}
		t.Rank = &w.Rank
		job.Workers = append(job.Workers, t)
	}
	return job, nil
}

// task is one process: on this host with our whole environment, on another with its portable part.
func (j *maker) task(name, host string, command []string, own map[string]string, sharing int) (*Task, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	t := &Task{Name: name, Host: host, Dir: dir, Command: command, Env: Merge(j.Env, own), Sharing: sharing}
	if j.here(host) {
		t.limitThreads()
	} else {
		shell := Shell{Template: j.settings.RemoteShell, Port: j.SSHPort, Identity: j.SSHIdentity, Timeout: j.settings.StartTimeout}
		if t.Shell, err = shell.For(host); err != nil {
			return nil, err
		}
		t.Env = Portable(t.Env)
		if names := withoutAddresses(t.Env["PACELINE_INTERFACE"]); names == "" {
			delete(t.Env, "PACELINE_INTERFACE")
		} else {
			t.Env["PACELINE_INTERFACE"] = names
		}
	}
	if j.Verbose {
		j.Say("%s on %s: %s", name, host, strings.Join(command, " "))
	}
	return t, nil
}

// withoutAddresses removes addresses from a list of interfaces: they are valid only on this machine.
func withoutAddresses(list string) string {
	names := slices.DeleteFunc(strings.Split(list, ","), func(item string) bool { return net.ParseIP(strings.TrimSpace(item)) != nil })
	return strings.Join(names, ",")
}

// streams gives a worker's output its prefix and, on request, its files.
func (j *maker) streams(console *Console, t *Task, w Worker) error {
	var files [2]io.WriteCloser // nil for none
	label := strconv.Itoa(w.Rank)
	if j.OutputDir != "" {
		digits := len(strconv.Itoa(w.Size - 1))
		dir := filepath.Join(j.OutputDir, fmt.Sprintf("rank.%0*d", digits, w.Rank))
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return err
		}
		for i, name := range []string{"stdout", "stderr"} {
			file, err := os.Create(filepath.Join(dir, name))
			if err != nil {
				if files[0] != nil {
					files[0].Close()
				}
				return err
			}
			files[i] = file
		}
	}
	t.Stdout, t.Stderr = console.Stream(label, false, files[0]), console.Stream(label, true, files[1])
	return nil
}
