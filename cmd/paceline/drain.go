package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/watch"
)

func drainCommand() *cobra.Command {
	var choice jobChoice
	var output jsonSwitch
	c := &cobra.Command{
		Use:   "drain server [job]",
		Short: "Have a dedicated server leave an elastic job, with nothing lost",
		Long: `Have a dedicated server leave an elastic job, with nothing lost.

The server answers what only it can answer; its keys go on at the other servers, with the same results as without the
change. Then it ends. The command waits for that. The server is named by its index or by its address, as ` + "`paceline servers`" + ` lists
them. The last server cannot be drained.`,
		Example: `  paceline drain 1
  paceline drain 1 4711 --json
  paceline drain 10.0.0.5:7001 --scheduler host1:7000`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("name the server, by its index or its address")
			}
			return atMostOneJob(c, args[1:])
		},
		RunE: func(c *cobra.Command, args []string) error { return choice.drain(c, args, &output) },
	}
	choice.add(c)
	output.add(c)
	wait := c.Flags().Lookup("timeout")
	choice.timeout, wait.DefValue, wait.Usage = time.Minute, "1m0s", "longest `time` to wait until the server has left; it leaves later all the same"
	return c
}

// drained is the result of a drain. One that fails is an error.
type drained struct {
	Server    string  `json:"server"` // as it was named
	Job       int     `json:"job,omitempty"`
	Scheduler string  `json:"scheduler"`
	Seconds   float64 `json:"seconds"` // until it had left
}

func (j *jobChoice) drain(c *cobra.Command, args []string, output *jsonSwitch) error {
	if err := output.check(); err != nil {
		return err
	}
	target, err := j.target(args[1:])
	if err != nil {
		return err
	}
	ctx, stop := untilSignal()
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, j.timeout)
	defer cancel()
	began := time.Now()
	if err := watch.Drain(ctx, &target.Settings, args[0]); err != nil {
		return err
	}
	result := drained{Server: args[0], Scheduler: target.Settings.Scheduler, Seconds: time.Since(began).Seconds()}
	if target.Job != nil {
		result.Job = target.Job.ID
	}
	return output.show(c, result, func(out io.Writer) { fmt.Fprintf(out, "server %s has left the job\n", args[0]) })
}
