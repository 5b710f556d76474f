package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

func statusCommand() *cobra.Command {
	var scheduler string
	var asJSON bool
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "status --scheduler host:port",
		Short: "Show the state of a job's scheduler",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if scheduler == "" && os.Getenv("PACELINE_SCHEDULER") == "" {
				return errors.New("--scheduler host:port (or PACELINE_SCHEDULER) must name the job")
			}
			s, err := settingsAs("server", scheduler, nil)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(c.Context(), timeout)
			defer cancel()
			status, err := askStatus(ctx, s)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(c.OutOrStdout(), status)
			}
			showStatus(c.OutOrStdout(), s.Scheduler, status)
			return nil
		},
	}
	c.Flags().StringVar(&scheduler, "scheduler", "", "`address` of the scheduler, host:port (default: PACELINE_SCHEDULER)")
	c.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	c.Flags().DurationVar(&timeout, "timeout", 5*time.Second, "how long to wait for an answer")
	return c
}

func askStatus(ctx context.Context, s settings.Settings) (wire.StatusReply, error) {
	kinds, err := node.Transports(&s, zap.NewNop())
	if err != nil {
		return wire.StatusReply{}, err
	}
	client, err := control.Dial(ctx, control.Config{
		Transport: kinds.Required(), Address: s.Scheduler, Hello: wire.Hello{Role: wire.RoleObserver}, BeatInterval: s.BeatInterval, LostAfter: s.PeerTimeout,
	})
	if err != nil {
		return wire.StatusReply{}, err
	}
	defer client.Close()
	return client.Status(ctx)
}

func showStatus(out io.Writer, address string, s wire.StatusReply) {
	up := time.Duration(s.Uptime * float64(time.Second)).Round(time.Second)
	fmt.Fprintf(out, "scheduler %s: %s, up %v, %d tensors\n", address, s.State, up, s.Tensors)
	if s.Waiting != "" {
		fmt.Fprintf(out, "waiting for %s\n", s.Waiting)
	}
	if s.Roster == nil {
		return
	}
	for _, w := range s.Roster.Workers {
		fmt.Fprintf(out, "worker %d on %s (pid %d), local rank %d of %d\n", w.Rank, w.Host, w.PID, w.LocalRank, w.LocalSize)
	}
	for i, n := range s.Roster.Servers {
		where := "dedicated"
		if n.Role == wire.RoleWorker {
			where = fmt.Sprintf("in worker %d", n.Rank)
		}
		fmt.Fprintf(out, "server %d on %s at %v, %s\n", i, n.Host, n.Addresses, where)
	}
}
