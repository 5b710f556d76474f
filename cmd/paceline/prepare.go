package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/secret"
	"github.com/paceline/paceline/node/settings"
)

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
	if j.np < 0 || j.np > limits.MaxRanks {
		return fmt.Errorf("-np %d: at least one process, at most %d", j.np, limits.MaxRanks)
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
	if len(j.interfaces) > 0 {
		j.env["PACELINE_INTERFACE"] = strings.Join(j.interfaces, ",")
	}
	names := j.env["PACELINE_INTERFACE"]
	away := j.away()
	var host string
	var err error
	switch {
	case j.listen != "":
		return j.listen, nil
	case away == "":
		host = iface.Loopback
	case names != "":
		if host, err = iface.Address(names); err != nil {
			err = fmt.Errorf("--network-interfaces: %w", err)
		}
	default:
		if host, err = iface.Towards(away); err != nil {
			err = fmt.Errorf("%w: say by --network-interfaces which of this machine's interfaces or addresses the hosts can reach", err)
		}
	}
	return net.JoinHostPort(host, "0"), err
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
