package main

import (
	"context"
	"net"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/internal/signals"
	"github.com/paceline/paceline/node"
)

func serverCommand() *cobra.Command {
	var scheduler, listen string
	var sockets int
	c := &cobra.Command{
		Use:   "server --scheduler host:port",
		Short: "Run a dedicated server of a job until a signal ends it",
		Long: `Run a dedicated server of a job until a signal ends it.

The server of an elastic job leaves it empty, so that nothing is lost, and then ends; a second signal ends it at once.
` + "`paceline drain`" + ` does the same from elsewhere.`,
		Args: noArguments,
		RunE: func(*cobra.Command, []string) error {
			s, err := settingsAs("server", fromFlag{"--scheduler", "PACELINE_SCHEDULER", scheduler}, fromFlag{"--sockets", "PACELINE_SERVER_SOCKETS", positive(sockets)})
			if err != nil {
				return err
			}
			if host, port, err := net.SplitHostPort(listen); err == nil && host == "" {
				if host, err = s.ListenHost(); err != nil {
					return err
				}
				listen = net.JoinHostPort(host, port)
			}
			signals.OutliveReaders()
			ctx, stop := untilSignal()
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal ends it at once
			return node.RunServer(ctx, s, listen, node.Options{})
		},
	}
	c.Flags().StringVar(&scheduler, "scheduler", "", "`address` of the scheduler, host:port, or several at which it may be started again, separated by commas (default: PACELINE_SCHEDULER)")
	c.Flags().StringVar(&listen, "listen", "", "`address` to listen at, host:port or :port (default: any port on the interface towards the scheduler)")
	c.Flags().Var(count{&sockets, 1, 1024}, "sockets", "`number` of sockets that listen on the port (default: one)")
	return c
}
