package main

import (
	"context"
	"errors"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
)

func schedulerCommand() *cobra.Command {
	var listen, numServers string
	c := &cobra.Command{
		Use:   "scheduler --listen host:port",
		Short: "Run the scheduler of a job until a signal ends it",
		Long: `Run the scheduler of a job until a signal ends it.

Only for jobs whose processes are started one by one: ` + "`paceline run`" + ` holds a scheduler of its own. It may be
killed and started again at any time; the job goes on.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if _, port, err := net.SplitHostPort(listen); err != nil || port == "0" {
				return errors.New("--listen host:port says where the others find the scheduler")
			}
			s, err := settingsAs("scheduler", listen, map[string]string{"PACELINE_NUM_SERVERS": numServers})
			if err != nil {
				return err
			}
			return runScheduler(s)
		},
	}
	c.Flags().StringVar(&listen, "listen", "", "`address` to listen at, host:port")
	c.Flags().StringVar(&numServers, "num-servers", "", "`number` of dedicated servers that a job waits for (default: as its workers say)")
	return c
}

func runScheduler(s settings.Settings) error {
	log, err := node.Logger(s.LogLevel, "scheduler", -1)
	if err != nil {
		return err
	}
	sched, err := node.StartScheduler(s, s.Scheduler, log)
	if err != nil {
		return err
	}
	ctx, stop := untilSignal()
	defer stop()
	<-ctx.Done()
	return sched.Close()
}

func serverCommand() *cobra.Command {
	var scheduler, listen string
	var shards int
	c := &cobra.Command{
		Use:   "server --scheduler host:port",
		Short: "Run a dedicated server of a job until a signal ends it",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			set := map[string]string{}
			if shards > 0 {
				set["PACELINE_SERVER_SHARDS"] = strconv.Itoa(shards)
			}
			s, err := settingsAs("server", scheduler, set)
			if err != nil {
				return err
			}
			if host, port, err := net.SplitHostPort(listen); err == nil && host == "" {
				if host, err = s.ListenHost(); err != nil {
					return err
				}
				listen = net.JoinHostPort(host, port)
			}
			log, err := node.Logger(s.LogLevel, "server", -1)
			if err != nil {
				return err
			}
			ctx, stop := untilSignal()
			defer stop()
			return node.RunServer(ctx, s, listen, log)
		},
	}
	c.Flags().StringVar(&scheduler, "scheduler", "", "`address` of the scheduler, host:port (default: PACELINE_SCHEDULER)")
	c.Flags().StringVar(&listen, "listen", "", "`address` to listen at, host:port or :port (default: any port on the interface towards the scheduler)")
	c.Flags().IntVar(&shards, "shards", 0, "`number` of shards (default: one per core)")
	return c
}

// settingsAs reads the environment in a role, with the scheduler's address from the command line if it
// is there, and shows the warnings.
func settingsAs(role, scheduler string, more map[string]string) (settings.Settings, error) {
	env := launch.Merge(launch.Variables(os.Environ()), map[string]string{"PACELINE_ROLE": role})
	if scheduler != "" {
		env["PACELINE_SCHEDULER"] = scheduler
	}
	for name, value := range more {
		if value != "" {
			env[name] = value
		}
	}
	s, warnings, err := settings.FromEnv(env)
	if err != nil {
		return s, err
	}
	more2, err := s.Complete()
	if log, logErr := node.Logger(s.LogLevel, role, -1); logErr == nil {
		for _, w := range append(warnings, more2...) {
			log.Warn(w)
		}
	}
	return s, err
}

func untilSignal() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
}
