package launch

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/secret"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
)

// Options describe what a launch starts.
type Options struct {
	Command           []string
	Env               map[string]string // of every process, before its own variables
	Processes         int               // workers; 0: every slot of the hosts, or 1
	Hosts, HostFile   string
	Servers           string // hosts of dedicated servers, some with a port
	Scheduler, Listen string // address of a running one, or the listen address of the launcher's own
	MasterPort        int    // of torch.distributed's store on rank 0's host; 0 for a free one
	Interfaces        []string
	SSHPort           int
	SSHIdentity       string
	OutputDir         string // additional output of each rank; "" for none
	Timestamps        bool
	Quiet             bool // nothing of the ranks on standard output: theirs goes to standard error
	Verbose           bool
	Every             time.Duration                    // with Verbose: from one line about the job to the next; 0: a minute
	Elastic           *Elastic                         // the job changes its size; nil: it does not
	Until             io.Reader                        // its end ends the job as SIGTERM does: that of whose part the job is; nil for none
	Say               func(format string, args ...any) // reports to the user
}

// maker turns options into a job. Its fields are set in this order.
type maker struct {
	Options
	heard chan os.Signal // of the user

	hostname  string
	workers   []Worker
	hosts     []Host // from which an elastic job starts
	discovery *discovery
	servers   []serverPlace
	settings  settings.Settings // of the launcher, as the scheduler
	console   *Console
}

// serverPlace is the place of a dedicated server.
type serverPlace struct{ host, port string }

// prepare detects every error of the options before anything is started.
func (j *maker) prepare() error {
	var err error
	if j.hostname, err = os.Hostname(); err != nil {
		return err
	}
	if err := j.place(); err != nil {
		return err
	}
	if j.Env["PYTHONUNBUFFERED"] == "" {
		j.Env["PYTHONUNBUFFERED"] = "1" // output appears without delay
	}
	if self, err := os.Executable(); err == nil {
		j.Env["PATH"] += ":" + filepath.Dir(self) // for `paceline server` on other hosts
	}
	return j.settle()
}

// place assigns ranks and servers to hosts.
func (j *maker) place() error {
	hosts := []Host{{Name: "localhost", Slots: max(j.Processes, 1)}}
	var err error
	switch {
	case j.Hosts != "" && j.HostFile != "":
		return errors.New("--hosts and --hostfile exclude each other")
	case j.Hosts != "":
		if hosts, err = ParseHosts(j.Hosts); err != nil {
			return fmt.Errorf("--hosts: %w", err)
		}
	case j.HostFile != "":
		file, err := os.Open(j.HostFile)
		if err != nil {
			return err
		}
		defer file.Close()
		if hosts, err = ParseHostFile(file); err != nil {
			return fmt.Errorf("%s: %w", j.HostFile, err)
		}
	}
	if j.Processes < 0 || j.Processes > limits.MaxRanks {
		return fmt.Errorf("-np %d: at least one process, at most %d", j.Processes, limits.MaxRanks)
	}
	if j.Elastic != nil {
		if err := j.placeElastic(hosts); err != nil {
			return err
		}
		return j.placeServers()
	}
	if j.workers, err = Assign(hosts, j.Processes); err != nil {
		return err
	}
	return j.placeServers()
}

func (j *maker) placeServers() error {
	if j.servers = nil; j.Servers != "" {
		for item := range strings.SplitSeq(j.Servers, ",") {
			item = strings.TrimSpace(item)
			host, port, err := net.SplitHostPort(item)
			if err != nil {
				host, port = strings.Trim(item, "[]"), ""
			}
			if _, err := ParseHosts(host); err != nil || host == "" {
				return fmt.Errorf("--servers: %q is not a host or host:port", item)
			}
			if n, err := strconv.ParseUint(port, 10, 16); port != "" && (err != nil || n == 0) {
				return fmt.Errorf("--servers: the port of %q is not one from 1 to 65535", item)
			}
			j.servers = append(j.servers, serverPlace{host, port})
		}
		running, _ := strconv.Atoi(j.Env["PACELINE_NUM_SERVERS"])
		j.Env["PACELINE_NUM_SERVERS"] = strconv.Itoa(running + len(j.servers))
	}
	if j.Env["PACELINE_NUM_SERVERS"] != "" && j.Env["PACELINE_NUM_SERVERS"] != "0" && j.Env["PACELINE_SERVERS"] == "" {
		j.Env["PACELINE_SERVERS"] = "dedicated"
	}
	return nil
}

// settle reads the settings as the scheduler of the job, and makes its secret.
func (j *maker) settle() error {
	address := j.Scheduler
	if address == "" {
		var err error
		if address, err = j.listenAddress(); err != nil {
			return err
		}
	}
	env := Merge(j.Env, map[string]string{"PACELINE_ROLE": "scheduler", "PACELINE_SCHEDULER": address})
	if j.Scheduler == "" && env["PACELINE_JOB_SECRET"] == "" && env["PACELINE_JOB_SECRET_FILE"] == "" {
		env["PACELINE_JOB_SECRET"] = string(secret.New())
	}
	s, _, err := settings.FromEnv(env) // warnings come from rank 0
	if err != nil {
		return err
	}
	if err := node.CheckSettings(&s, len(j.workers), len(j.away()) > 0); err != nil {
		return err
	}
	if err := s.Complete(); err != nil {
		return err
	}
	if !utf8.Valid(s.JobSecret) { // the processes have it in a variable
		return fmt.Errorf("PACELINE_JOB_SECRET_FILE: the secret in %s is no text in UTF-8, which paceline run needs: encode it (base64)", s.SecretFile)
	}
	j.settings = s
	return nil
}

// listenAddress is the listen address of the launcher's own scheduler: on loopback for a local job, else on the
// interface towards the other hosts.
func (j *maker) listenAddress() (string, error) {
	if len(j.Interfaces) > 0 {
		j.Env["PACELINE_INTERFACE"] = strings.Join(j.Interfaces, ",")
	}
	if j.Listen != "" {
		return j.Listen, nil
	}
	host, err := j.ownAddress()
	return net.JoinHostPort(host, "0"), err
}

// away are the other hosts of the job.
func (j *maker) away() []string {
	hosts := append(each.Of(j.workers, func(w Worker) string { return w.Host }), each.Of(j.servers, func(s serverPlace) string { return s.host })...)
	return slices.DeleteFunc(slices.Compact(hosts), j.here) // of a host its workers follow each other
}

func (j *maker) here(host string) bool { return iface.IsLocal(host, j.hostname) }
