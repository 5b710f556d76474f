package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/internal/secret"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
)

// runOptions are the flags of `paceline run` that are not settings.
type runOptions struct {
	np                int
	hosts, hostFile   string
	servers           string
	scheduler, listen string
	horovod           bool
	interfaces        []string
	sshPort           int
	sshIdentity       string
	outputDir         string
	timestamps        bool
	verbose           bool
	configFile        string
	checkBuild        bool
}

func runCommand() *cobra.Command {
	var o runOptions
	c := &cobra.Command{
		Use:   "run [flags] command...",
		Short: "Run a command as the workers of a job, here or on several hosts",
		Long: `Run a command as the workers of a job, here or on several hosts.

The flags are horovodrun's. The scheduler runs in the launcher, a server in every worker, and the job's
secret is made anew for each run.`,
		Example: `  paceline run -np 4 python train.py
  paceline run -np 4 --horovod python train_with_horovod.py
  paceline run -H host1:2,host2:2 --servers host3,host4 python train.py`,
		RunE: func(c *cobra.Command, command []string) error { return o.run(c, command) },
	}
	f := c.Flags()
	f.SetInterspersed(false) // what follows the command's name is the command's
	f.SortFlags = false
	f.IntVarP(&o.np, "np", "n", 0, "number of `processes` (default: every slot of the hosts, or 1); also -np, --num-proc")
	f.IntVar(&o.np, "num-proc", 0, "")
	f.StringVarP(&o.hosts, "hosts", "H", "", "`hosts` and their slots: host1:2,host2:4")
	f.StringVar(&o.hostFile, "hostfile", "", "`file` with a host on each line: host1 slots=2")
	f.StringVar(&o.servers, "servers", "", "`hosts` on which to start dedicated servers: host3,host4:7001 (with a port)")
	f.StringVar(&o.scheduler, "scheduler", "", "`address` of a scheduler that runs already, host:port")
	f.StringVar(&o.listen, "listen", "", "`address` at which the launcher's own scheduler listens, host:port")
	f.BoolVar(&o.horovod, "horovod", false, "let 'import horovod' find Paceline")
	f.StringSliceVar(&o.interfaces, "network-interfaces", nil, "`names` of network interfaces to use, or addresses; the first that is there counts")
	f.StringSliceVar(&o.interfaces, "network-interface", nil, "")
	f.IntVarP(&o.sshPort, "ssh-port", "p", 0, "`port` of ssh on the hosts")
	f.StringVarP(&o.sshIdentity, "ssh-identity-file", "i", "", "`file` with the key for ssh")
	f.StringVar(&o.outputDir, "output-filename", "", "`directory` for the output of each rank as well: rank.0/stdout, rank.0/stderr, ...")
	f.BoolVar(&o.timestamps, "prefix-output-with-timestamp", false, "begin each line of output with the time")
	f.BoolVar(&o.verbose, "verbose", false, "say what is started where")
	f.StringVar(&o.configFile, "config-file", "", "`file` with settings, YAML as horovodrun has it; flags come first")
	f.BoolVar(&o.checkBuild, "check-build", false, "say what this build can do; also -cb")
	addHorovodFlags(f)
	for _, name := range []string{"num-proc", "network-interface"} {
		f.Lookup(name).Hidden = true
	}
	return c
}

func (o *runOptions) run(c *cobra.Command, command []string) error {
	if o.checkBuild {
		checkBuild(c.OutOrStdout())
		return nil
	}
	if o.configFile != "" {
		if err := applyConfig(o.configFile, c.Flags()); err != nil {
			return err
		}
	}
	if names := given(c.Flags(), elasticFlags); len(names) > 0 {
		return fmt.Errorf("%s: the number of processes cannot change during a run in this version; say -np and the hosts", strings.Join(names, ", "))
	}
	if len(command) == 0 {
		return errors.New("no command to run: paceline run -np 2 python train.py")
	}
	given, err := settingsOf(c.Flags())
	if err != nil {
		return err
	}
	j := &jobMaker{runOptions: o, command: command, env: launch.Merge(launch.Variables(os.Environ()), given)}
	if err := j.prepare(); err != nil {
		return err
	}
	if names := idle(c); names != "" {
		say("%s: without effect here", names)
	}
	return j.run()
}

func idle(c *cobra.Command) string { return strings.Join(given(c.Flags(), idleFlags), ", ") }

func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "paceline run: "+format+"\n", args...)
}

// A jobMaker turns options into a job. Its fields are filled in the order in which they stand here.
type jobMaker struct {
	*runOptions
	command []string
	env     map[string]string // of every process, before its own variables

	hostname string
	workers  []launch.Worker
	servers  []serverPlace
	settings settings.Settings // of the launcher, as the scheduler
	files    []*os.File        // output files
}

// serverPlace is where a dedicated server is to be started.
type serverPlace struct{ host, port string }

// prepare works out everything that can be wrong before anything is started.
func (j *jobMaker) prepare() error {
	var err error
	if j.hostname, err = os.Hostname(); err != nil {
		return err
	}
	if err := j.place(); err != nil {
		return err
	}
	if j.horovod {
		dir, err := shimDir(j.command)
		if err != nil {
			return err
		}
		j.env["PYTHONPATH"] = strings.TrimSuffix(dir+":"+j.env["PYTHONPATH"], ":")
	}
	if j.env["PYTHONUNBUFFERED"] == "" {
		j.env["PYTHONUNBUFFERED"] = "1" // progress is seen when it is made
	}
	if self, err := os.Executable(); err == nil {
		j.env["PATH"] += ":" + filepath.Dir(self) // for `paceline server` on other hosts
	}
	return j.settle()
}

// place says which rank and which server runs on which host.
func (j *jobMaker) place() error {
	hosts := []launch.Host{{Name: "localhost", Slots: max(j.np, 1)}}
	var err error
	switch {
	case j.hosts != "" && j.hostFile != "":
		return errors.New("--hosts and --hostfile exclude each other")
	case j.hosts != "":
		if hosts, err = launch.ParseHosts(j.hosts); err != nil {
			return fmt.Errorf("--hosts: %w", err)
		}
	case j.hostFile != "":
		file, err := os.Open(j.hostFile)
		if err != nil {
			return err
		}
		defer file.Close()
		if hosts, err = launch.ParseHostFile(file); err != nil {
			return fmt.Errorf("%s: %w", j.hostFile, err)
		}
	}
	if j.np < 0 {
		return fmt.Errorf("-np %d: at least one process", j.np)
	}
	if j.workers, err = launch.Assign(hosts, j.np); err != nil {
		return err
	}
	return j.placeServers()
}

func (j *jobMaker) placeServers() error {
	if j.servers = nil; j.runOptions.servers != "" {
		for item := range strings.SplitSeq(j.runOptions.servers, ",") {
			host, port, err := net.SplitHostPort(item)
			if err != nil {
				host, port = strings.Trim(item, "[]"), ""
			}
			if _, err := launch.ParseHosts(host); err != nil || host == "" {
				return fmt.Errorf("--servers: %q is not a host or host:port", item)
			}
			j.servers = append(j.servers, serverPlace{host, port})
		}
		running, _ := strconv.Atoi(j.env["PACELINE_NUM_SERVERS"])
		j.env["PACELINE_NUM_SERVERS"] = strconv.Itoa(running + len(j.servers))
	}
	if j.env["PACELINE_NUM_SERVERS"] != "" && j.env["PACELINE_NUM_SERVERS"] != "0" && j.env["PACELINE_SERVERS"] == "" {
		j.env["PACELINE_SERVERS"] = "dedicated"
	}
	return nil
}

// settle reads the settings as the scheduler of the job, and makes its secret.
func (j *jobMaker) settle() error {
	address := j.scheduler
	if address == "" {
		var err error
		if address, err = j.listenAddress(); err != nil {
			return err
		}
	}
	env := launch.Merge(j.env, map[string]string{"PACELINE_ROLE": "scheduler", "PACELINE_SCHEDULER": address})
	if j.scheduler == "" && env["PACELINE_JOB_SECRET"] == "" && env["PACELINE_JOB_SECRET_FILE"] == "" {
		env["PACELINE_JOB_SECRET"] = string(secret.New())
	}
	s, _, err := settings.FromEnv(env) // warnings come from rank 0
	if err != nil {
		return err
	}
	warnings, err := s.Complete()
	for _, w := range warnings {
		say("%s", w)
	}
	j.settings = s
	return err
}

// listenAddress is where the launcher's own scheduler listens: on loopback for a local job, else on the
// interface towards the other hosts.
func (j *jobMaker) listenAddress() (string, error) {
	name := j.env["PACELINE_INTERFACE"]
	if len(j.interfaces) > 0 {
		if name = firstThere(j.interfaces); name == "" {
			return "", fmt.Errorf("--network-interfaces: this machine has none of %s", strings.Join(j.interfaces, ", "))
		}
		j.env["PACELINE_INTERFACE"] = name
	}
	away := j.away()
	var host string
	var err error
	switch {
	case j.listen != "":
		return j.listen, nil
	case away == "":
		host = iface.Loopback
	case name != "":
		host, err = iface.Address(name)
	default:
		if host, err = iface.Towards(away); err != nil {
			err = fmt.Errorf("%w: say by --network-interfaces which of this machine's interfaces or addresses the hosts can reach", err)
		}
	}
	return net.JoinHostPort(host, "0"), err
}

func firstThere(names []string) string {
	for _, name := range names {
		if _, err := iface.Address(name); err == nil {
			return name
		}
	}
	return ""
}

// away is the first host of the job that is not this one; "" if there is none.
func (j *jobMaker) away() string {
	for _, w := range j.workers {
		if !j.here(w.Host) {
			return w.Host
		}
	}
	for _, s := range j.servers {
		if !j.here(s.host) {
			return s.host
		}
	}
	return ""
}

func (j *jobMaker) here(host string) bool { return iface.IsLocal(host, j.hostname) }

// run starts the scheduler and the job and waits for its end.
func (j *jobMaker) run() error {
	address := j.settings.Scheduler
	if j.scheduler == "" {
		log, err := node.Logger(j.settings.LogLevel, "scheduler", -1)
		if err != nil {
			return err
		}
		sched, err := node.StartScheduler(j.settings, address, log)
		if err != nil {
			return err
		}
		defer sched.Close()
		address = sched.Address
	}
	maps.Copy(j.env, map[string]string{"PACELINE_SCHEDULER": address, "PACELINE_JOB_SECRET": string(j.settings.JobSecret)})
	for _, name := range []string{"PACELINE_JOB_SECRET_FILE", "PACELINE_ROLE", "DMLC_ROLE", "PACELINE_PORT"} {
		delete(j.env, name)
	}
	defer j.closeFiles()
	job, err := j.job(address)
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	if code := job.Run(signals); code != 0 {
		return exitCode(code)
	}
	return nil
}

// job makes the processes.
func (j *jobMaker) job(scheduler string) (*launch.Job, error) {
	console := &launch.Console{Stdout: os.Stdout, Stderr: os.Stderr, Timestamps: j.timestamps}
	job := &launch.Job{Start: j.settings.StartTimeout, Peers: launch.DefaultPeers, Stop: launch.DefaultStop, Say: say}
	for _, s := range j.servers {
		command := []string{"paceline", "server", "--scheduler", scheduler}
		if s.port != "" {
			command = append(command, "--listen", ":"+s.port)
		}
		t, err := j.task("server", s.host, command, map[string]string{"PACELINE_HOST": s.host})
		if err != nil {
			return nil, err
		}
		t.Stdout, t.Stderr = console.Stream("server "+s.host, false, nil), console.Stream("server "+s.host, true, nil)
		job.Servers = append(job.Servers, t)
	}
	for _, w := range j.workers {
		t, err := j.task(fmt.Sprintf("rank %d", w.Rank), w.Host, j.command, w.Env())
		if err != nil {
			return nil, err
		}
		if err := j.streams(console, t, w); err != nil {
			return nil, err
		}
		job.Workers = append(job.Workers, t)
	}
	return job, nil
}

// task is one process: on this host with all of our environment, on another with what means the same there.
func (j *jobMaker) task(name, host string, command []string, own map[string]string) (*launch.Task, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	t := &launch.Task{Name: name, Host: host, Dir: dir, Command: command, Env: launch.Merge(j.env, own)}
	if !j.here(host) {
		shell := launch.Shell{Template: j.settings.RemoteShell, Port: j.sshPort, Identity: j.sshIdentity, Timeout: j.settings.StartTimeout}
		if t.Shell, err = shell.For(host); err != nil {
			return nil, err
		}
		t.Env = launch.Portable(t.Env)
		if net.ParseIP(t.Env["PACELINE_INTERFACE"]) != nil {
			delete(t.Env, "PACELINE_INTERFACE") // an address of this machine
		}
	}
	if j.verbose {
		say("%s on %s: %s", name, host, strings.Join(command, " "))
	}
	return t, nil
}

// streams gives a worker's output its prefix, and its files if wanted.
func (j *jobMaker) streams(console *launch.Console, t *launch.Task, w launch.Worker) error {
	var files [2]*os.File
	label := strconv.Itoa(w.Rank)
	if j.outputDir == "" {
		t.Stdout, t.Stderr = console.Stream(label, false, nil), console.Stream(label, true, nil)
		return nil
	}
	digits := len(strconv.Itoa(w.Size - 1))
	dir := filepath.Join(j.outputDir, fmt.Sprintf("rank.%0*d", digits, w.Rank))
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	for i, name := range []string{"stdout", "stderr"} {
		file, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		files[i], j.files = file, append(j.files, file)
	}
	t.Stdout, t.Stderr = console.Stream(label, false, files[0]), console.Stream(label, true, files[1])
	return nil
}

func (j *jobMaker) closeFiles() {
	for _, f := range j.files {
		if err := f.Close(); err != nil {
			say("%v", err)
		}
	}
}
