package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/watch"
	"github.com/paceline/paceline/internal/runfile"
)

// jobChoice chooses the jobs that status and top show.
type jobChoice struct {
	scheduler string
	timeout   time.Duration
	given     func() bool // the timeout is the user's
}

func (j *jobChoice) add(c *cobra.Command) {
	c.Flags().StringVar(&j.scheduler, "scheduler", "", "`address` of the scheduler of a job elsewhere, host:port (default: PACELINE_SCHEDULER); its secret is in PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE")
	c.Flags().DurationVar(&j.timeout, "timeout", 5*time.Second, "longest `time` to wait for an answer; in a list a second, if not given")
	j.given = func() bool { return c.Flags().Changed("timeout") }
}

func statusCommand() *cobra.Command {
	var choice jobChoice
	var output jsonSwitch
	c := &cobra.Command{
		Use:   "status [job]",
		Short: "Show this user's jobs on this machine, or one job",
		Long: `Show this user's jobs on this machine, or one job.

A job has the number of the process that runs its scheduler: the launcher, or rank 0 under another launcher. One job is
shown in full, several as a list. The command looks for a second, over which it measures rates. An iteration is a use of
the tensor that has moved the most bytes; unnamed operations of one kind, type and shape are one tensor.`,
		Example: `  paceline status
  paceline status 4711 --json
  paceline status --scheduler host1:7000`,
		Args: atMostOneJob,
		RunE: func(c *cobra.Command, args []string) error { return choice.status(c, args, &output) },
	}
	choice.add(c)
	output.add(c)
	return c
}

// patience is how long to wait for the answers of jobs. One that does not answer does not hold up a list of several.
func (j *jobChoice) patience(jobs int) time.Duration {
	if jobs > 1 && !j.given() {
		return listTime
	}
	return j.timeout
}

// listTime is patience with the jobs of a list.
const listTime = time.Second

// rateTime is the time over which status measures rates.
const rateTime = time.Second

func (j *jobChoice) status(c *cobra.Command, args []string, output *jsonSwitch) error {
	if err := output.check(); err != nil {
		return err
	}
	targets, err := j.targets(args)
	if err != nil {
		return err
	}
	ctx, stop := untilSignal()
	defer stop()
	patience, over := j.patience(len(targets)), time.After(rateTime)
	views := watch.Look(ctx, targets, patience)
	if len(targets) == 1 && len(views) == 1 && views[0].Err != nil {
		return views[0].Silence()
	}
	select {
	case <-over:
	case <-ctx.Done():
		return exitCode(130)
	}
	views = watch.Since(views, watch.Look(ctx, targets, patience))
	if len(views) == 0 {
		return errors.New("the job has just ended")
	}
	text := func(out io.Writer) { watch.Show(out, views, 0) }
	if targets[0].Job == nil || len(args) > 0 { // one job was asked for
		return output.show(c, views[0], text)
	}
	return output.show(c, views, text)
}

func atMostOneJob(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if _, err := strconv.Atoi(args[0]); err != nil {
		return noArguments(c, args)
	}
	return noArguments(c, args[1:])
}

// targets are the chosen jobs, at least one.
func (j *jobChoice) targets(args []string) ([]watch.Target, error) {
	if j.timeout <= 0 {
		return nil, fmt.Errorf("--timeout %v: allowed is a time above 0", j.timeout)
	}
	if j.scheduler != "" || len(args) == 0 && os.Getenv("PACELINE_SCHEDULER") != "" {
		if len(args) > 0 {
			return nil, errors.New("name the job by its number or by --scheduler, not by both")
		}
		s, err := settingsAs(observer, fromFlag{"--scheduler", "PACELINE_SCHEDULER", j.scheduler})
		return []watch.Target{{Settings: s}}, err
	}
	jobs, bad := runfile.List()
	if len(args) > 0 {
		for _, job := range jobs {
			if strconv.Itoa(job.ID) == args[0] {
				return watch.Here([]runfile.Job{job}), nil
			}
		}
		return nil, cmp.Or(bad, fmt.Errorf("no job %s of this user runs on this machine; paceline status lists those that do", args[0]))
	}
	if len(jobs) == 0 {
		return nil, cmp.Or(bad, fmt.Errorf("no job of this user runs on this machine (looked in %s); give --scheduler host:port for one elsewhere", strings.Join(runfile.Dirs(), " and ")))
	}
	return watch.Here(jobs), nil
}

// target is the one chosen job.
func (j *jobChoice) target(args []string) (watch.Target, error) {
	targets, err := j.targets(args)
	switch {
	case err != nil:
		return watch.Target{}, err
	case len(targets) > 1:
		return watch.Target{}, fmt.Errorf("%d jobs of this user run on this machine: name one, paceline status lists them", len(targets))
	}
	return targets[0], targets[0].Err
}
