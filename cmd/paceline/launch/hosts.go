// Package launch starts the processes of a job on this and other hosts, forwards their output and signals, and
// ensures that all of them end.
//
// Reading order: run.go and prepare.go turn options into a job; hosts.go and plan.go assign processes to hosts, with
// their environments (pure); process.go, local.go and remote.go are one process; output.go is the console; job.go the job.
package launch

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/paceline/paceline/internal/limits"
)

// Host is a machine and its number of workers.
type Host struct {
	Name  string
	Slots int
}

// ParseHosts reads "host1:2,host2:2". Without a number a host has one slot; a host named twice has
// the slots of both.
func ParseHosts(list string) ([]Host, error) {
	var hosts []Host
	for item := range strings.SplitSeq(list, ",") {
		name, slots, err := splitSlots(strings.TrimSpace(item), 1)
		if err != nil {
			return nil, err
		}
		if hosts, err = addHost(hosts, name, slots); err != nil {
			return nil, err
		}
	}
	return hosts, nil
}

// ParseHostFile reads a host file: on each line a host, "host slots=2" as Horovod and Open MPI write it
// or "host:2". What follows a # is a comment, other words such as max_slots=4 are Open MPI's.
func ParseHostFile(r io.Reader) ([]Host, error) {
	var hosts []Host
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		name, slots, err := splitSlots(words[0], 1)
		for _, word := range words[1:] {
			if text, ok := strings.CutPrefix(word, "slots="); ok && err == nil {
				slots, err = parseSlots(text)
			}
		}
		if err == nil {
			hosts, err = addHost(hosts, name, slots)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if len(hosts) == 0 && lines.Err() == nil {
		return nil, fmt.Errorf("it names no host")
	}
	return hosts, lines.Err()
}

// ParseFound reads what a discovery script prints: on each line a host, "host:2", or "host" with slots that another place says. As with Horovod
// the last line of a host counts, and "host:0" is none.
func ParseFound(text string, slots int) ([]Host, error) {
	hosts := []Host{}
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		drained := strings.HasSuffix(line, ":0") && net.ParseIP(line) == nil
		if drained {
			line = strings.TrimSuffix(line, ":0")
		}
		name, n, err := splitSlots(line, slots)
		if err != nil {
			return nil, err
		}
		hosts = slices.DeleteFunc(hosts, func(h Host) bool { return h.Name == name })
		if drained {
			continue
		}
		if hosts, err = addHost(hosts, name, n); err != nil {
			return nil, err
		}
	}
	return hosts, nil
}

func addHost(hosts []Host, name string, slots int) ([]Host, error) {
	if name == "" || strings.HasPrefix(name, "-") || strings.ContainsAny(name, " \t'\"\\$`;&|<>(){}") {
		return nil, fmt.Errorf("%q is not the name of a host", name)
	}
	for i := range hosts {
		if hosts[i].Name == name {
			hosts[i].Slots += slots
			return hosts, nil
		}
	}
	return append(hosts, Host{name, slots}), nil
}

// splitSlots parses "host:2", "host", "[fe80::1]:2" or "fe80::1"; unsaid are the slots of a host without a number.
func splitSlots(item string, unsaid int) (name string, slots int, err error) {
	if net.ParseIP(item) != nil {
		return item, unsaid, nil
	}
	at := strings.LastIndex(item, ":")
	if at < 0 || strings.HasSuffix(item, "]") {
		return strings.Trim(item, "[]"), unsaid, nil
	}
	slots, err = parseSlots(item[at+1:])
	return strings.Trim(item[:at], "[]"), slots, err
}

func parseSlots(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > limits.MaxRanks {
		return 0, fmt.Errorf("%q slots of a host: allowed are 1 to %d", text, limits.MaxRanks)
	}
	return n, nil
}
