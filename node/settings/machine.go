package settings

import (
	"bufio"
	"cmp"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/internal/secret"
)

// Complete adds the machine's own data: its name and address, the job's secret, the bound of a server's
// memory. The settings are then complete. It may be called again.
func (s *Settings) Complete() error { return s.complete(iface.Lookup) }

func (s *Settings) complete(lookup lookup) (err error) {
	if s.Host == "" {
		if s.Host, err = os.Hostname(); err != nil {
			return fmt.Errorf("the machine has no name (set PACELINE_HOST): %w", err)
		}
	}
	if s.ServerMemory == 0 {
		s.ServerMemory = memoryBytes() / 2 / int64(max(s.LocalSize, 1))
	}
	if s.Scheduler, err = s.reached(s.Scheduler, lookup); err != nil {
		return err
	}
	if s.EmbedScheduler != "" && !s.Local {
		host, port, _ := net.SplitHostPort(s.Scheduler)
		if host, err = s.masterAddress(host, lookup); err != nil {
			return err
		}
		s.EmbedScheduler = net.JoinHostPort(host, port)
		s.Scheduler = s.EmbedScheduler
	}
	return s.loadSecret()
}

// lookup resolves a host's name, as iface.Lookup does.
type lookup = func(host string) ([]net.IP, error)

// Reached is an address to listen at, host:port, as other hosts have it: its host may be a name of this machine that
// leads to loopback here.
func (s *Settings) Reached(address string) (string, error) { return s.reached(address, iface.Lookup) }

// reached is Reached for one address, or for several with commas between. Loopback stays where a user has given it, but MASTER_ADDR
// may be localhost on rank 0's host of a job over several. So does everything on a machine without another address.
func (s *Settings) reached(addresses string, lookup lookup) (string, error) {
	if s.Local {
		return addresses, nil
	}
	derived := s.Role == "worker" && s.From["PACELINE_SCHEDULER"] == ""
	list := strings.Split(addresses, ",")
	for i, address := range list {
		host, port, err := net.SplitHostPort(address)
		at, own := iface.Own(host, lookup)
		if err != nil || !own && !(derived && iface.IsLoopback(host)) {
			continue
		}
		if at == "" {
			if at, err = s.jobAddress(); err != nil && s.Interface != "" {
				return "", err
			}
		}
		if at != "" {
			list[i] = net.JoinHostPort(at, port)
		}
	}
	return strings.Join(list, ","), nil
}

// masterAddress is this machine's address behind MASTER_ADDR. A service's name may lead here through a translation: then
// it is the address of the job's interface.
func (s *Settings) masterAddress(host string, lookup lookup) (string, error) {
	if iface.IsLoopback(host) { // there is no other
		return host, nil
	}
	if at, own := iface.Own(host, lookup); at != "" || own {
		return cmp.Or(at, host), nil
	}
	return s.jobAddress()
}

// jobAddress is this machine's address for other hosts of the job.
func (s *Settings) jobAddress() (string, error) {
	if s.Interface != "" {
		return s.ListenHost()
	}
	return iface.Outward()
}

func (s *Settings) loadSecret() (err error) {
	switch {
	case len(s.JobSecret) > 0:
	case s.SecretFile != "":
		if s.JobSecret, err = secret.ReadFile(s.SecretFile); err != nil {
			return fmt.Errorf("PACELINE_JOB_SECRET_FILE: %w", err)
		}
	default:
		shared, err := secret.Shared(s.SecretDir)
		if err != nil {
			return fmt.Errorf("the job's secret (PACELINE_JOB_SECRET sets one): %w", err)
		}
		s.JobSecret = secret.Derive(shared, s.SecretFor)
	}
	return nil
}

// ListenHost is the address that this process's listeners bind to and that others reach them at:
// loopback for a local job, else that of the setting Interface, else the one from which this machine
// reaches the scheduler.
func (s *Settings) ListenHost() (string, error) {
	switch {
	case s.Interface != "":
		address, err := iface.Address(s.Interface)
		if err != nil {
			return "", fmt.Errorf("%s: %w", s.from("PACELINE_INTERFACE"), err)
		}
		return address, nil
	case s.Local:
		return iface.Loopback, nil
	}
	first, _, _ := strings.Cut(s.Scheduler, ",")
	host, _, err := net.SplitHostPort(first)
	if err != nil {
		return "", err
	}
	if s.EmbedScheduler != "" {
		return host, nil // Complete made it the address at which others reach this machine
	}
	return iface.Towards(host)
}

// TimelinePath is the file that a rank traces to: rank 0 to the named one, rank 3 to trace.3.json where
// the name is trace.json.
func TimelinePath(path string, rank int) string {
	if path == "" || rank == 0 {
		return path
	}
	return beforeEnding(path, strconv.Itoa(rank))
}

// roundPath is the file of a round of a job that changes its size: trace.json, and trace.round2.json later. What the one before has written stays.
func roundPath(path string, round uint64) string {
	if path == "" || round < 2 {
		return path
	}
	return beforeEnding(path, fmt.Sprint("round", round))
}

// beforeEnding puts a word before the ending of a file's name: trace.word.json.
func beforeEnding(path, word string) string {
	ext := filepath.Ext(path)
	return strings.TrimSuffix(path, ext) + "." + word + ext
}

// memoryBytes is the memory of this machine, or of this container if that is less.
func memoryBytes() int64 {
	total := int64(4 << 30) // if the system does not say
	if n, ok := meminfoTotal(); ok {
		total = n
	}
	if text, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n < total {
			total = n
		}
	}
	return total
}

func meminfoTotal() (int64, bool) {
	file, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemTotal:"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
			return n << 10, err == nil
		}
	}
	return 0, false
}
