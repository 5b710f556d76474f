package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/watch"
)

func drainCommand() *cobra.Command {
	var choice jobChoice
	c := &cobra.Command{
		Use:   "drain server [job]",
		Short: "Have a dedicated server leave an elastic job, with nothing lost",
		Long: `Have a dedicated server leave an elastic job, with nothing lost.

The server answers what only it can answer; its keys go on at the other servers, with the same results as without the
change. Then it ends. The command waits for that. The server is named by its index or by its address, as ` + "`paceline servers`" + ` lists
them. The last server cannot be drained.`,
		Example: `  paceline drain 1
  paceline drain 1 4711
  paceline drain 10.0.0.5:7001 --scheduler host1:7000`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("name the server, by its index or its address")
			}
			return atMostOneJob(c, args[1:])
		},
		RunE: func(c *cobra.Command, args []string) error { return choice.drain(c, args) },
	}
	choice.add(c)
	wait := c.Flags().Lookup("timeout")
	choice.timeout, wait.DefValue, wait.Usage = time.Minute, "1m0s", "longest `time` to wait until the server has left; it leaves later all the same"
	return c
}

func (j *jobChoice) drain(c *cobra.Command, args []string) error {
	target, err := j.target(args[1:])
	if err != nil {
		return err
	}
	ctx, stop := untilSignal()
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, j.timeout)
	defer cancel()
	if err := watch.Drain(ctx, &target.Settings, args[0]); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.OutOrStdout(), "server %s has left the job\n", args[0])
	return err
}
