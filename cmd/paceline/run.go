package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/internal/limits"
)

// runOptions are the flags of `paceline run` that are not settings.
type runOptions struct {
	launch.Options
	elastic    elasticFlags
	horovod    bool
	takeover   string
	configFile string
	checkBuild bool
	untilEnd   bool
	output     jsonSwitch
}

func runCommand() *cobra.Command {
	var o runOptions
	c := &cobra.Command{
		Use:   "run [flags] command...",
		Short: "Run a command as the workers of a job, here or on several hosts",
		Long: `Run a command as the workers of a job, here or on several hosts.

The flags are horovodrun's. The scheduler runs in the launcher, and a server in every worker, unless --servers or --num-servers
is given. Each run has a new secret, unless PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE gives one.`,
		Example: `  paceline run -np 4 python train.py
  paceline run -np 4 --horovod python train_with_horovod.py
  paceline run -H host1:2,host2:2 --servers host3,host4 python train.py`,
		RunE: func(c *cobra.Command, command []string) error { return o.run(c, command) },
	}
	f := c.Flags()
	f.SetInterspersed(false) // arguments after the command's name belong to the command
	f.SortFlags = false
	addRanks(f, count{&o.Processes, 1, limits.MaxRanks}, "`number` of processes (default: every slot of the hosts, or 1)")
	f.StringVarP(&o.Hosts, "hosts", "H", "", "`hosts` and their slots: host1:2,host2:4")
	f.StringVar(&o.HostFile, "hostfile", "", "`file` with a host on each line: host1 slots=2")
	f.StringVar(&o.Servers, "servers", "", "`hosts` on which to start dedicated servers: host3,host4:7001 (with a port)")
	f.StringVar(&o.Scheduler, "scheduler", "", "`address` of a running scheduler, host:port, or several at which it may be started again, separated by commas")
	f.StringVar(&o.Listen, "listen", "", "`address` at which the launcher's own scheduler listens, host:port")
	f.Var(count{&o.MasterPort, 1, 65535}, "master-port", "`port` of torch.distributed's store on the host of rank 0 (default: a free one), for scripts that use it too")
	f.BoolVar(&o.horovod, "horovod", false, "let 'import horovod' find Paceline")
	f.StringVar(&o.takeover, "takeover", "", "torch.distributed `backend` in whose place Paceline stands: gloo")
	f.StringSliceVar(&o.Interfaces, "network-interfaces", nil, "`names` of network interfaces, or addresses of this machine; each host uses the first that it has")
	f.StringSliceVar(&o.Interfaces, "network-interface", nil, "")
	f.VarP(count{&o.SSHPort, 1, 65535}, "ssh-port", "p", "`port` of ssh on the hosts")
	f.StringVarP(&o.SSHIdentity, "ssh-identity-file", "i", "", "`file` with the key for ssh")
	f.StringVar(&o.OutputDir, "output-filename", "", "additional `directory` for the output of each rank: rank.0/stdout, rank.0/stderr, ...")
	f.BoolVar(&o.Timestamps, "prefix-output-with-timestamp", false, "begin each line of output with the time")
	f.BoolVar(&o.Verbose, "verbose", false, "show each started process, the address of the scheduler, and each minute how far the job is")
	o.output.addAs(c, "print how the job went as JSON at its end, and the ranks' standard output to standard error; --json=`FILE` writes it to a file, and the output stays")
	f.StringVar(&o.configFile, "config-file", "", "`file` with settings, in horovodrun's YAML; flags take precedence")
	f.BoolVar(&o.untilEnd, "until-input-ends", false, "end the job when standard input ends, as at SIGTERM: for programs of whom the job is a part")
	f.BoolVar(&o.checkBuild, "check-build", false, "show the capabilities of this build; also -cb")
	o.elastic.add(f)
	addHorovodFlags(f)
	f.Lookup("network-interface").Hidden = true
	f.Lookup("until-input-ends").Hidden = true
	return c
}

func (o *runOptions) run(c *cobra.Command, command []string) error {
	if o.checkBuild && o.output.to != "" {
		return errors.New("--check-build has no JSON: paceline info --json has the build")
	}
	if o.checkBuild {
		checkBuild(c.OutOrStdout())
		return nil
	}
	if o.configFile != "" {
		if err := applyConfig(o.configFile, c.Flags()); err != nil {
			return err
		}
	}
	elastic, err := o.elastic.given(c.Flags())
	if err != nil {
		return err
	}
	o.Elastic = elastic
	if len(command) == 0 || command[0] == "" {
		return errors.New("no command to run: paceline run -np 2 python train.py")
	}
	if err := namesReport(c, command[0]); err != nil {
		return err
	}
	flagged, err := settingsOf(c.Flags())
	if err != nil {
		return err
	}
	if names := given(c.Flags(), idleFlags); len(names) > 0 {
		sayAs(c)("%s: without effect here", strings.Join(names, ", "))
	}
	o.Command, o.Env, o.Say = command, launch.Merge(launch.Variables(os.Environ()), flagged), sayAs(c)
	if o.horovod {
		dir, err := shimDir(command)
		if err != nil {
			return err
		}
		o.Env["PYTHONPATH"] = strings.TrimSuffix(dir+":"+o.Env["PYTHONPATH"], ":")
	}
	if o.takeover != "" {
		if o.takeover != "gloo" {
			return fmt.Errorf("--takeover %s: allowed is gloo, torch.distributed's backend for tensors on the CPU", o.takeover)
		}
		o.Env["PACELINE_TAKEOVER"] = o.takeover
	}
	if err := o.output.check(); err != nil {
		return err
	}
	o.Quiet = !o.output.text()
	if o.untilEnd {
		o.Until = os.Stdin
	}
	report, err := launch.Run(o.Options)
	if err != nil {
		return byFlags(err, o.settingFlags(c.Flags()))
	}
	if err := o.output.write(c, report); err != nil && report.Code == 0 {
		return err
	} else if err != nil {
		sayAs(c)("%v", err) // and the ranks' code stays that of the command
	}
	return codeOf(report)
}

// namesReport is an error about a word in the place of the command that is probably the file for the JSON.
func namesReport(c *cobra.Command, word string) error {
	if !strings.HasPrefix(filepath.Ext(word), ".json") {
		return nil
	}
	if _, err := exec.LookPath(word); err == nil {
		return nil
	}
	return namesFile(c, word)
}

// settingFlags are the flags that give settings, by the settings' variables.
func (o *runOptions) settingFlags(flags *pflag.FlagSet) map[string]string {
	given := map[string]string{}
	for _, f := range settingFlags {
		if flags.Changed(f.name) {
			given[f.setting] = "--" + f.name
		}
	}
	switch {
	case o.Scheduler != "":
		given["PACELINE_SCHEDULER"] = "--scheduler"
	case o.Listen != "":
		given["PACELINE_SCHEDULER"] = "--listen"
	}
	return given
}

// runJob returns a failed worker's exit code.
func runJob(o launch.Options) error {
	report, err := launch.Run(o)
	if err != nil {
		return err
	}
	return codeOf(report)
}

func codeOf(r launch.Report) error {
	if r.Code != 0 {
		return exitCode(r.Code)
	}
	return nil
}

// sayAs reports to the user under the name of the command that they gave.
func sayAs(c *cobra.Command) func(format string, args ...any) {
	return func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, c.CommandPath()+": "+format+"\n", args...)
	}
}
