package settings

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"strconv"
	"strings"

	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/internal/secret"
)

// rendezvous finds the scheduler, whether this process runs it, whether the job is local,
// and where the secret comes from.
func rendezvous(s *Settings, env map[string]string) error {
	if err := bytepsRoot(s, env); err != nil {
		return err
	}
	switch {
	case s.Scheduler != "":
		s.Local = true
		for at := range strings.SplitSeq(s.Scheduler, ",") {
			host, port, _ := net.SplitHostPort(at)
			if port == "0" && s.Role != "scheduler" {
				return fmt.Errorf("%s=%q: port 0 is no port to find the scheduler at", s.from("PACELINE_SCHEDULER"), s.Scheduler)
			}
			s.Local = s.Local && iface.IsLoopback(host) // no other host could reach it
		}
	case s.Role != "worker":
		return fmt.Errorf("a %s needs the scheduler's address: set PACELINE_SCHEDULER=host:port", s.Role)
	case s.Size == 1 && s.Servers == "embedded":
		s.Local = true
		s.EmbedScheduler = net.JoinHostPort(iface.Loopback, "0")
	default:
		if err := embed(s, env); err != nil {
			return err
		}
	}
	s.Standby = s.Elastic && s.Role == "worker" && s.Size > 1 && (strings.Contains(s.Scheduler, ",") || s.From["PACELINE_SCHEDULER"] == "")
	return trust(s, env)
}

// bytepsRoot takes the scheduler's address from BytePS's two variables.
func bytepsRoot(s *Settings, env map[string]string) error {
	host, port := env["DMLC_PS_ROOT_URI"], env["DMLC_PS_ROOT_PORT"]
	if s.Scheduler != "" || host == "" && port == "" {
		return nil
	}
	if _, err := parsePort("DMLC_PS_ROOT_PORT", port); err != nil || host == "" {
		return fmt.Errorf("DMLC_PS_ROOT_URI=%q with DMLC_PS_ROOT_PORT=%q: set both, to the scheduler's host and port", host, port)
	}
	s.Scheduler = net.JoinHostPort(host, port)
	s.From["PACELINE_SCHEDULER"] = "DMLC_PS_ROOT_URI"
	return nil
}

// embed puts the scheduler into rank 0. The others find it at MASTER_ADDR, or at the host that the launcher's
// variables give for rank 0.
func embed(s *Settings, env map[string]string) error {
	host := masterHost(s, env)
	if host == "" {
		return fmt.Errorf("rank %d of %d does not know the scheduler's address: set PACELINE_SCHEDULER=host:port, or MASTER_ADDR to the host of rank 0 and PACELINE_PORT to a free port there",
			s.Rank, s.Size)
	}
	port, err := rendezvousPort(s, env)
	if err != nil {
		return err
	}
	s.Local = iface.IsLoopback(host)
	if s.Servers == "embedded" { // there are only ranks, which all find it where rank 0 does
		// Where there are other hosts, which needs a secret and shows in local sizes, their master may have MASTER_ADDR=localhost.
		given := len(s.JobSecret) > 0 || s.SecretFile != ""
		s.Local = s.LocalSize == s.Size || s.Local && (!given || s.LocalSize < 0)
	}
	if s.Local {
		host = iface.Loopback
	}
	s.Scheduler = net.JoinHostPort(host, strconv.Itoa(port))
	if s.Rank == 0 {
		s.EmbedScheduler = s.Scheduler
	}
	return nil
}

func masterHost(s *Settings, env map[string]string) string {
	switch {
	case env["MASTER_ADDR"] != "":
		return env["MASTER_ADDR"]
	case s.LocalSize == s.Size:
		return iface.Loopback
	case s.Launcher == "srun":
		return firstOfNodes(env["SLURM_STEP_NODELIST"])
	}
	return ""
}

// rendezvousPort is the port of a scheduler in rank 0: PACELINE_PORT, or one that every rank derives equally
// from MASTER_PORT (which itself belongs to torch's store) or from the launcher's number of the job.
// Derived ports lie in 16384 to 32767, below those that the system hands out to outgoing connections.
func rendezvousPort(s *Settings, env map[string]string) (int, error) {
	if s.Port > 0 {
		return s.Port, nil
	}
	if text := env["MASTER_PORT"]; text != "" {
		master, err := parsePort("MASTER_PORT", text)
		return derivedPort(uint32(master) + 1), err
	}
	if job := jobOf(env); job != "" {
		sum := fnv.New32a()
		sum.Write([]byte(job))
		return derivedPort(sum.Sum32()), nil
	}
	return 0, errors.New("the ranks have to agree on a port for the scheduler: set PACELINE_PORT on all of them, or PACELINE_SCHEDULER=host:port")
}

func derivedPort(n uint32) int { return 16384 + int(n%16384) }

func parsePort(variable, text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%s=%q: allowed are 1 to 65535", variable, text)
	}
	return int(n), nil
}

// jobOf is the launcher's name of this job, equal on all ranks; "" if there is none.
func jobOf(env map[string]string) string {
	for _, names := range [][]string{
		{"TORCHELASTIC_RUN_ID"},
		{"PMIX_NAMESPACE"},
		{"OMPI_MCA_ess_base_jobid"},
		{"SLURM_JOB_ID", "SLURM_STEP_ID"},
	} {
		job := ""
		for _, name := range names {
			if env[name] != "" {
				job += name + "=" + env[name] + " "
			}
		}
		if job != "" {
			return job
		}
	}
	return ""
}

// trust finds the source of the job's secret. A local job without one derives it from the user's shared
// secret and the scheduler's port and, where rank 0 is the scheduler and all nodes are ranks, and so come from one
// launcher, that launcher's name of the job.
func trust(s *Settings, env map[string]string) error {
	switch {
	case len(s.JobSecret) > 0 && s.SecretFile != "":
		s.SecretFile = "" // the environment takes precedence
		return nil
	case len(s.JobSecret) > 0 || s.SecretFile != "":
		return nil
	case !s.Local:
		return fmt.Errorf("this job may reach over several hosts (the scheduler is at %s), so it needs a secret: set PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE to the same on every host, or start it with `paceline run`",
			s.Scheduler)
	}
	if strings.Contains(s.Scheduler, ",") {
		return fmt.Errorf("a job that looks for its scheduler at several addresses (%s) needs a secret: set PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE to the same on all nodes",
			s.Scheduler)
	}
	s.SecretDir = secret.RunDir(env["XDG_RUNTIME_DIR"])
	if s.Scheduler == "" {
		s.SecretFor = "alone"
		return nil
	}
	_, port, _ := net.SplitHostPort(s.Scheduler)
	s.SecretFor = "port " + port
	if s.From["PACELINE_SCHEDULER"] == "" && s.Role == "worker" && s.Servers == "embedded" {
		s.SecretFor += " " + jobOf(env)
	}
	return nil
}

// firstOfNodes is the first host of a Slurm node list such as "gpu[03-05,9],cpu1".
func firstOfNodes(list string) string {
	name, _, _ := strings.Cut(list, ",")
	head, rest, ok := strings.Cut(name, "[")
	if !ok {
		return name
	}
	first, _, _ := strings.Cut(strings.TrimSuffix(rest, "]"), "-")
	return head + first
}
