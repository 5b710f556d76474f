package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/internal/signals"
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
			switch _, port, _ := net.SplitHostPort(listen); {
			case listen == "":
				return errors.New("give the address at which nodes find it: --listen host:port")
			case port == "0":
				return fmt.Errorf("--listen %q: nodes have to know the port", listen)
			}
			s, err := settingsAs("scheduler", fromFlag{"--listen", "PACELINE_SCHEDULER", listen}, fromFlag{"--num-servers", "PACELINE_NUM_SERVERS", numServers})
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
	sched, err := node.StartScheduler(s, s.Scheduler, node.Options{})
	if err != nil {
		return err
	}
	sched.Publish()
	signals.OutliveReaders()
	ctx, stop := untilSignal()
	defer stop()
	<-ctx.Done()
	return sched.Close()
}

// observer is the role of a process that looks at a job and takes no part.
const observer = "observer"

// fromFlag is a setting that a flag gives in place of its variable; the value is "" where the flag was not given.
type fromFlag struct{ flag, variable, value string }

// settingsAs reads the environment in a role, with what flags give, and shows the warnings if this process is to. An error names the flags.
func settingsAs(role string, given ...fromFlag) (settings.Settings, error) {
	env := launch.Merge(launch.Variables(os.Environ()), map[string]string{"PACELINE_ROLE": role})
	if role == observer {
		env["PACELINE_ROLE"] = "server" // what it has to know is the same
	}
	flags := map[string]string{}
	for _, g := range given {
		if g.value != "" {
			env[g.variable], flags[g.variable] = g.value, g.flag
		}
	}
	s, warnings, err := settings.FromEnv(env)
	if err != nil {
		return s, byFlags(err, flags)
	}
	err = s.Complete()
	if log, logErr := node.Logger(s.LogLevel, role, -1); logErr == nil && s.Speaks() {
		for _, w := range warnings {
			log.Warn(w)
		}
	}
	return s, byFlags(err, flags)
}

func untilSignal() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), signals.Ending()...)
}
