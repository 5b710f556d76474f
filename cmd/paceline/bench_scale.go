package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/bench"
	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
)

// scaleOptions are the flags of `paceline bench scale`.
type scaleOptions struct {
	workers, tensors []int
	sizes            []string
	duration         time.Duration
	output           jsonSwitch
}

func benchScaleCommand() *cobra.Command {
	var o scaleOptions
	c := &cobra.Command{
		Use:   "scale",
		Short: "Time one server with many workers, and measure its memory",
		Long: `Time one server with many workers, and measure its memory.

The server is a process of its own on this host, and all workers are in another, each with connections of its own:
both share the cores. Every sum is checked. bench/README.md explains the figures.`,
		Example: `  paceline bench scale -np 64,256,1000 --json=scale.json`,
		Args:    noArguments,
		RunE:    func(c *cobra.Command, _ []string) error { return o.run(c) },
	}
	f := c.Flags()
	f.SortFlags = false
	o.workers, o.tensors = []int{64, 256, 1000}, []int{1, 16}
	addRanks(f, counts{&o.workers, 1, limits.MaxRanks}, "`numbers` of workers, a job for each")
	f.StringSliceVar(&o.sizes, "sizes", []string{"4KiB"}, "`sizes` of a tensor")
	f.Var(counts{&o.tensors, 1, 1 << 12}, "tensors", "`numbers` of tensors that are exchanged together")
	f.DurationVar(&o.duration, "duration", 5*time.Second, "`time` for each size and number")
	o.output.add(c)
	return c
}

func (o *scaleOptions) run(c *cobra.Command) error {
	plan := bench.ScalePlan{Tensors: o.tensors, Duration: o.duration}
	for _, text := range o.sizes {
		bytes, err := settings.ParseSize(text)
		if err != nil || bytes < 4 || bytes%4 != 0 {
			return fmt.Errorf("--sizes %q: a size is a number of bytes, or one with KiB, MiB, GiB, in elements of 4", text)
		}
		plan.Sizes = append(plan.Sizes, bytes)
	}
	if err := o.output.check(); err != nil {
		return err
	}
	report := bench.ScaleReport{Head: bench.NewHead("scale")}
	for _, n := range o.workers {
		result, err := scale(n, plan)
		if err != nil {
			return fmt.Errorf("%d workers: %w", n, err)
		}
		if o.output.text() {
			result.Show(c.OutOrStdout())
		}
		report.Results = append(report.Results, result)
	}
	return o.output.write(c, report)
}

// scale runs one job.
func scale(n int, plan bench.ScalePlan) (result bench.ScaleResult, err error) {
	ctx, stop := untilSignal()
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends it at once
	env := launch.Merge(launch.Variables(os.Environ()), map[string]string{
		"PACELINE_RANK": "0", "PACELINE_SIZE": fmt.Sprint(n), "PACELINE_LOCAL_RANK": "0", "PACELINE_LOCAL_SIZE": fmt.Sprint(n),
		"PACELINE_SCHEDULER": "127.0.0.1:1", "PACELINE_SERVERS": "dedicated", "PACELINE_NUM_SERVERS": "1",
		"PACELINE_TRANSPORT": cmp.Or(os.Getenv("PACELINE_TRANSPORT"), "tcp"), // as workers on other hosts
	})
	s, _, err := settings.FromEnv(env)
	if err != nil {
		return result, err
	}
	if err := s.Complete(); err != nil {
		return result, err
	}
	sched, err := node.StartScheduler(s, "127.0.0.1:0", node.Options{})
	if err != nil {
		return result, err
	}
	defer sched.Close()
	server, end, err := startServer(sched.Address, &s, env)
	if err != nil {
		return result, err
	}
	defer end()
	var workers []*node.Worker
	start := func() ([]*node.Worker, error) {
		workers, err = startWorkers(ctx, s, sched.Address)
		return workers, err
	}
	defer func() { leave(workers) }()
	return bench.MeasureScale(ctx, start, server, plan)
}

// startServer starts a server in a process of its own, and waits until it listens.
func startServer(scheduler string, s *settings.Settings, env map[string]string) (pid int, end func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, nil, err
	}
	c := exec.Command(self, "server", "--scheduler", scheduler)
	c.Env = launch.Lines(launch.Merge(env, map[string]string{"PACELINE_JOB_SECRET": string(s.JobSecret), "PACELINE_LOG_LEVEL": "info"}))
	said, err := c.StderrPipe()
	if err != nil {
		return 0, nil, err
	}
	if err := c.Start(); err != nil {
		return 0, nil, err
	}
	listens, over := make(chan bool, 1), make(chan struct{})
	go func() {
		defer close(over)
		for lines := bufio.NewScanner(said); lines.Scan(); {
			switch line := lines.Text(); {
			case strings.Contains(line, "server listens"):
				listens <- true
			case !strings.Contains(line, " info "):
				fmt.Fprintln(os.Stderr, line)
			}
		}
	}()
	end = func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		<-over
		_ = c.Wait() // it was told to end, and how it ends is not measured
	}
	select {
	case <-listens:
		return c.Process.Pid, end, nil
	case <-over:
		return 0, nil, fmt.Errorf("the server has ended: %w", c.Wait())
	}
}

// startWorkers starts all workers of the job, each with an engine of its own.
func startWorkers(ctx context.Context, s settings.Settings, scheduler string) ([]*node.Worker, error) {
	workers, errs := make([]*node.Worker, s.Size), make([]error, s.Size)
	var all sync.WaitGroup
	for rank := range workers {
		all.Go(func() {
			own := s
			own.Rank, own.LocalRank = rank, rank
			workers[rank], errs[rank] = node.StartWorker(ctx, own, node.Options{Scheduler: scheduler})
		})
	}
	all.Wait()
	return workers, errors.Join(errs...)
}

// leave shuts all workers down, which wait for each other.
func leave(workers []*node.Worker) {
	var all sync.WaitGroup
	for _, w := range workers {
		if w != nil {
			all.Go(w.Shutdown)
		}
	}
	all.Wait()
}
