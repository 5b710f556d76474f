package settings

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/paceline/paceline/internal/limits"
)

// A launcher is a set of variables that identify a process. All come from the first launcher whose rank and
// size are set: a job script under Slurm may start torchrun, and the local rank of one does not match the rank
// of the other.
type launcher struct {
	name                 string
	rank, size           string
	localRank, localSize string
	crossRank, crossSize string
	sure                 bool // only the launcher sets these: one without the other is an error
}

var launchers = []launcher{
	{"paceline", "PACELINE_RANK", "PACELINE_SIZE", "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE", "PACELINE_CROSS_RANK", "PACELINE_CROSS_SIZE", true},
	{"horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", true},
	{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", true},
	{"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "", "", false},
	{"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", "", false},
	{"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", false},
	{"byteps", "BYTEPS_GLOBAL_RANK", "", "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", "DMLC_WORKER_ID", "DMLC_NUM_WORKER", false},
}

// The table's rows about identity.
var identityDocs = []struct {
	name, preset, allowed, doc string
	least                      int
	variable                   func(launcher) string
	value                      func(*Settings) *int
}{
	{"PACELINE_RANK", "0", fmt.Sprintf("are 0 to %d", limits.MaxRanks-1), "Number of this worker in the job.", 0, func(l launcher) string { return l.rank }, func(s *Settings) *int { return &s.Rank }},
	{"PACELINE_SIZE", "1", fmt.Sprintf("are 1 to %d", limits.MaxRanks), "Number of workers in the job.", 1, func(l launcher) string { return l.size }, func(s *Settings) *int { return &s.Size }},
	{"PACELINE_LOCAL_RANK", "", "are 0 to the local size less 1", "Number of this worker among those of its host. Without it, by the hosts' names.", 0, func(l launcher) string { return l.localRank }, func(s *Settings) *int { return &s.LocalRank }},
	{"PACELINE_LOCAL_SIZE", "", "are 1 to the size", "Number of workers on this host. Without it, by the hosts' names.", 1, func(l launcher) string { return l.localSize }, func(s *Settings) *int { return &s.LocalSize }},
	{"PACELINE_CROSS_RANK", "", "are 0 to the cross size less 1", "Number of this host in the job. Without it, by the hosts' names.", 0, func(l launcher) string { return l.crossRank }, func(s *Settings) *int { return &s.CrossRank }},
	{"PACELINE_CROSS_SIZE", "", "are 1 to the size", "Number of hosts in the job. Without it, by the hosts' names.", 1, func(l launcher) string { return l.crossSize }, func(s *Settings) *int { return &s.CrossSize }},
}

func identityRows() []Setting {
	var rows []Setting
	for _, d := range identityDocs {
		one := Setting{Name: d.name, Default: d.preset, Allowed: d.allowed, Doc: d.doc}
		for _, l := range launchers[1:] {
			if v := d.variable(l); v != "" {
				one.Synonyms = append(one.Synonyms, v)
			}
		}
		rows = append(rows, one)
	}
	return rows
}

func (s *Settings) identityValues() []Value {
	var values []Value
	for _, d := range identityDocs {
		one := Value{d.name, strconv.Itoa(*d.value(s)), s.from(d.name)}
		if *d.value(s) < 0 {
			one.Value = "" // by the hosts' names
		}
		values = append(values, one)
	}
	return values
}

// identify sets the process's identity. A server or scheduler needs only the host.
func identify(s *Settings, env map[string]string) error {
	s.Rank, s.Size = 0, 1
	s.LocalRank, s.LocalSize, s.CrossRank, s.CrossSize = -1, -1, -1, -1
	if s.Role != "worker" && s.Role != "" { // "" if the role itself is invalid
		s.Launched = env["PACELINE_LAUNCHED"] != ""
		return nil
	}
	l, err := launcherOf(env)
	if err != nil {
		return err
	}
	if l == nil {
		s.LocalRank, s.LocalSize, s.CrossRank, s.CrossSize = 0, 1, 0, 1
		return nil
	}
	s.Launcher = l.name
	s.ElasticRound, _ = strconv.ParseUint(env["PACELINE_ELASTIC_ROUND"], 10, 64)
	r := numbers{env: env}
	for _, d := range identityDocs {
		v := d.variable(*l)
		if r.read(d.value(s), v, d.least); env[v] != "" {
			s.From[d.name] = v
		}
	}
	switch l.name {
	case "srun":
		s.LocalSize = tasksOnNode(env["SLURM_STEP_TASKS_PER_NODE"], s.CrossRank)
	case "byteps":
		byHosts(s, env)
	}
	return errors.Join(r.err, bounds(s, l))
}

// launcherOf finds the launcher whose variables are set; nil for none.
func launcherOf(env map[string]string) (*launcher, error) {
	if env["SLURM_STEP_NUM_TASKS"] == "" && env["SLURM_STEP_ID"] != "" {
		// Older srun. Without a step this is a batch script, whose SLURM_NTASKS are for later steps.
		older := slices.Clone(launchers)
		older[slices.IndexFunc(older, func(l launcher) bool { return l.name == "srun" })].size = "SLURM_NTASKS"
		return pick(older, env)
	}
	return pick(launchers, env)
}

func pick(launchers []launcher, env map[string]string) (*launcher, error) {
	for i, l := range launchers {
		rank, size := env[l.rank] != "", env[l.size] != ""
		if other := repeated(l, launchers[i+1:], env); other != nil {
			return other, nil
		}
		switch {
		case l.name == "byteps":
			if env["DMLC_NUM_WORKER"] != "" && (rank || env["DMLC_WORKER_ID"] != "") {
				return &launchers[i], nil
			}
		case rank && size:
			return &launchers[i], nil
		case rank && l.sure:
			return nil, fmt.Errorf("%s=%q is set, but %s is not: set both or none", l.rank, env[l.rank], l.size)
		case size && l.sure:
			return nil, fmt.Errorf("%s=%q is set, but %s is not: set both or none", l.size, env[l.size], l.rank)
		}
	}
	return nil, nil
}

// repeated is a launcher further on that says the same and more, nil for none: srun --mpi=pmi2 sets mpiexec's rank and size beside its own
// numbers, and a script may have exported the size alone.
func repeated(l launcher, others []launcher, env map[string]string) *launcher {
	if env[l.size] == "" || env[l.localRank] != "" {
		return nil
	}
	other, _ := pick(others, env)
	if other == nil || env[other.size] != env[l.size] || env[l.rank] != "" && env[other.rank] != env[l.rank] {
		return nil
	}
	return other
}

// byHosts computes BytePS's ranks: its workers are hosts, with a number of processes on each.
func byHosts(s *Settings, env map[string]string) {
	s.LocalRank, s.LocalSize = max(s.LocalRank, 0), max(s.LocalSize, 1)
	s.Size = s.CrossSize * s.LocalSize
	if env["BYTEPS_GLOBAL_RANK"] == "" {
		s.Rank, s.From["PACELINE_RANK"] = s.CrossRank*s.LocalSize+s.LocalRank, "DMLC_WORKER_ID"
	}
	s.From["PACELINE_SIZE"] = "DMLC_NUM_WORKER"
}

// bounds reports inconsistent numbers.
func bounds(s *Settings, l *launcher) error {
	switch {
	case s.Size > limits.MaxRanks:
		return fmt.Errorf("%s=%d: allowed are 1 to %d", l.size, s.Size, limits.MaxRanks)
	case s.Rank >= s.Size:
		return fmt.Errorf("rank %d of %s in a job of %d: ranks count from 0", s.Rank, l.name, s.Size)
	case s.LocalSize > s.Size:
		return fmt.Errorf("%s=%d is more than the job's %d workers", l.localSize, s.LocalSize, s.Size)
	case s.LocalSize > 0 && s.LocalRank >= s.LocalSize:
		return fmt.Errorf("%s=%d with %d workers on this host: local ranks count from 0", l.localRank, s.LocalRank, s.LocalSize)
	}
	if s.Size == 1 {
		s.LocalRank, s.LocalSize, s.CrossRank, s.CrossSize = 0, 1, 0, 1
	}
	return nil
}

// numbers reads variables with a number, and records the first without.
type numbers struct {
	env map[string]string
	err error
}

func (r *numbers) read(into *int, variable string, low int) {
	text := strings.TrimSpace(r.env[variable])
	if variable == "" || text == "" {
		return
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < low || n > limits.MaxRanks {
		r.err = errors.Join(r.err, fmt.Errorf("%s=%q: allowed are %d to %d", variable, text, low, limits.MaxRanks))
		return
	}
	*into = n
}

// tasksOnNode reads Slurm's list of the numbers of tasks on each node, "4(x2),3", at one of them;
// -1 if it has none.
func tasksOnNode(list string, node int) int {
	if list == "" || node < 0 {
		return -1
	}
	for part := range strings.SplitSeq(list, ",") {
		count, times := strings.TrimSuffix(part, ")"), 1
		if head, tail, ok := strings.Cut(count, "(x"); ok {
			n, err := strconv.Atoi(tail)
			if err != nil {
				return -1
			}
			count, times = head, n
		}
		tasks, err := strconv.Atoi(count)
		if err != nil {
			return -1
		}
		if node < times {
			return tasks
		}
		node -= times
	}
	return -1
}
