package main

import (
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/watch"
)

func serversCommand() *cobra.Command {
	var choice jobChoice
	var output jsonSwitch
	c := &cobra.Command{
		Use:   "servers [job]",
		Short: "List the servers of a job with what each has and does",
		Long: `List the servers of a job, those in its workers and the dedicated ones, with what each has and does: its keys, which are partitions
of tensors, the bytes of these, and the bytes that come to it per second, measured over a second; with what its workers have measured:
the speed of an exchange with one of them, and how long one of all its bytes takes, with the standard error. The dedicated servers that
have gone are listed too.`,
		Example: `  paceline servers
  paceline servers 4711 --json
  paceline servers --scheduler host1:7000`,
		Args: atMostOneJob,
		RunE: func(c *cobra.Command, args []string) error { return choice.servers(c, args, &output) },
	}
	choice.add(c)
	output.add(c)
	return c
}

func (j *jobChoice) servers(c *cobra.Command, args []string, output *jsonSwitch) error {
	if err := output.check(); err != nil {
		return err
	}
	target, err := j.target(args)
	if err != nil {
		return err
	}
	ctx, stop := untilSignal()
	defer stop()
	over := time.After(rateTime)
	before, err := watch.Ask(ctx, &target.Settings, j.timeout)
	if err != nil {
		return err
	}
	select {
	case <-over:
	case <-ctx.Done():
		return exitCode(130)
	}
	now, err := watch.Ask(ctx, &target.Settings, j.timeout)
	if err != nil {
		return err
	}
	servers, err := watch.Servers(&before, &now)
	if err != nil {
		return err
	}
	return output.show(c, servers, func(out io.Writer) { watch.ShowServers(out, servers, &now) })
}
