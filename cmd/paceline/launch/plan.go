package launch

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/paceline/paceline/internal/each"
)

// Worker is one rank's place in the job.
type Worker struct {
	Host                 string
	Rank, Size           int
	LocalRank, LocalSize int
	CrossRank, CrossSize int // among the ranks with the same local rank, in the order of the hosts
}

// Assign gives ranks to hosts in their order, each host filled before the next. np 0 fills every slot.
func Assign(hosts []Host, np int) ([]Worker, error) {
	slots := 0
	for _, h := range hosts {
		slots += h.Slots
	}
	if np = cmp.Or(np, slots); np > slots {
		return nil, fmt.Errorf("%d processes do not fit on hosts with %d slots: name more hosts or more slots (-H host1:4,host2:4)", np, slots)
	}
	var workers []Worker
	sizes := make([]int, len(hosts)) // workers on each host
	for i, h := range hosts {
		sizes[i] = min(h.Slots, np-len(workers))
		for local := range sizes[i] {
			workers = append(workers, Worker{Host: h.Name, Rank: len(workers), Size: np, LocalRank: local, LocalSize: sizes[i], CrossRank: peers(sizes[:i], local)})
		}
	}
	for i := range workers {
		workers[i].CrossSize = peers(sizes, workers[i].LocalRank)
	}
	return workers, nil
}

// peers counts the hosts that have a worker of a local rank.
func peers(sizes []int, local int) int {
	n := 0
	for _, size := range sizes {
		if size > local {
			n++
		}
	}
	return n
}

// Env are the variables that give a worker its place, under our names and those that scripts of Horovod and of
// torch.distributed read.
func (w Worker) Env() map[string]string {
	env := map[string]string{
		"PACELINE_HOST": w.Host, "HOROVOD_HOSTNAME": w.Host, "RANK": strconv.Itoa(w.Rank), "WORLD_SIZE": strconv.Itoa(w.Size),
		"LOCAL_RANK": strconv.Itoa(w.LocalRank), "LOCAL_WORLD_SIZE": strconv.Itoa(w.LocalSize),
	}
	for name, n := range map[string]int{
		"RANK": w.Rank, "SIZE": w.Size, "LOCAL_RANK": w.LocalRank, "LOCAL_SIZE": w.LocalSize, "CROSS_RANK": w.CrossRank, "CROSS_SIZE": w.CrossSize,
	} {
		env["PACELINE_"+name] = strconv.Itoa(n)
		env["HOROVOD_"+name] = strconv.Itoa(n)
	}
	return env
}

// Merge combines maps of variables; later ones take precedence.
func Merge(envs ...map[string]string) map[string]string {
	all := map[string]string{}
	for _, env := range envs {
		maps.Copy(all, env)
	}
	return all
}

// Lines writes variables in the form of an environment, in the order of their names.
func Lines(env map[string]string) []string {
	return each.Of(slices.Sorted(maps.Keys(env)), func(name string) string { return name + "=" + env[name] })
}

// Variables reads such lines.
func Variables(lines []string) map[string]string {
	env := map[string]string{}
	for _, line := range lines {
		name, value, _ := strings.Cut(line, "=")
		env[name] = value
	}
	return env
}

// Portable keeps the variables that mean the same on another host: all but those that belong to this
// machine, this login or this terminal, and those that a shell cannot export.
func Portable(env map[string]string) map[string]string {
	kept := map[string]string{}
	for name, value := range env {
		if exportable.MatchString(name) && !slices.Contains(ofThisHost, name) && !slices.ContainsFunc(ofThisLogin, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			kept[name] = value
		}
	}
	return kept
}

var ofThisHost = []string{"HOSTNAME", "HOST", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "MAIL", "TERM", "DISPLAY", "TMPDIR", "TMP", "TEMP", "LS_COLORS", "WINDOWID", "TTY",
	"UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"} // where bash is sh, it ends at an export of one of these
var ofThisLogin = []string{"SSH_", "XDG_", "DBUS_", "SUDO_", "TMUX", "STY", "SLURM_", "OMPI_", "PMIX_", "PMI_"}

// exportable are the names that a shell can export.
var exportable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
