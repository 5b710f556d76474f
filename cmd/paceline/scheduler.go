package main

import (
	"context"
	"errors"
	"net"
	"os"
	"os/signal"
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

Only for jobs whose processes are started separately: ` + "`paceline run`" + ` has a scheduler of its own. It may be
killed and started again at any time; the job continues.`,
		Args: noArguments,
		RunE: func(*cobra.Command, []string) error {
			if _, port, err := net.SplitHostPort(listen); err != nil || port == "0" {
				return errors.New("--listen host:port must give the scheduler's address")
			}
			s, err := settingsAs("scheduler", listen, map[string]string{"PACELINE_NUM_SERVERS": numServers})
			if err != nil {
				flags := map[string]string{"PACELINE_SCHEDULER": "--listen"}
				if numServers != "" {
					flags["PACELINE_NUM_SERVERS"] = "--num-servers"
				}
				return byFlags(err, flags)
			}
			return runScheduler(s)
		},
	}
	c.Flags().StringVar(&listen, "listen", "", "`address` to listen at, host:port")
	c.Flags().StringVar(&numServers, "num-servers", "", "`number` of dedicated servers that a job waits for (default: as its workers say)")
	return c
}

func runScheduler(s settings.Settings) error {
	sched, err := node.StartScheduler(s, s.Scheduler, node.Options{})
	if err != nil {
		return err
	}
	sched.Publish()
	ctx, stop := untilSignal()
	defer stop()
	<-ctx.Done()
	return sched.Close()
}

// observer is the role of a process that looks at a job and takes no part.
const observer = "observer"

// settingsAs reads the environment in a role, with the scheduler's address from the command line if given, and
// shows the warnings.
func settingsAs(role, scheduler string, more map[string]string) (settings.Settings, error) {
	env := launch.Merge(launch.Variables(os.Environ()), map[string]string{"PACELINE_ROLE": role})
	if role == observer {
		env["PACELINE_ROLE"] = "server" // what it has to know is the same
	}
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
	err = s.Complete()
	if log, logErr := node.Logger(s.LogLevel, role, -1); logErr == nil {
		for _, w := range warnings {
			log.Warn(w)
		}
	}
	return s, err
}

func untilSignal() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
}
