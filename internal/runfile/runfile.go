// Package runfile lists the jobs of this user on this machine.
//
// The process that runs a job's scheduler writes a file (mode 0600) into a directory that nobody else can enter, and
// holds a lock on it for as long as it runs. The file says how the scheduler is reached, the job's secret included. A
// file without a lock belongs to a process that was killed, and is removed by whoever finds it.
package runfile

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/secret"
)

// Job is one job, as its scheduler's process describes it.
type Job struct {
	ID        int               `json:"id"`   // pid of the process that runs the scheduler
	Host      string            `json:"host"` // of it, and
	Boot      string            `json:"boot"` // its kernel's number: hosts may share the directory, whose locks they do not see of one another
	Scheduler string            `json:"scheduler"`
	Started   time.Time         `json:"started"`
	Command   []string          `json:"command"` // of that process
	Directory string            `json:"directory"`
	Env       map[string]string `json:"env"` // by which a process reaches the scheduler
}

// File is a job's file while its scheduler runs.
type File struct {
	lock *os.File
	path string
}

const prefix = "job-"

// Publish writes the file of a job whose scheduler this process runs. The file appears with its lock: it is written under
// another name. ID, Host, Boot and Started are Publish's to set.
func Publish(j Job) (*File, error) {
	j.ID, j.Host, j.Boot, j.Started, j.Command = os.Getpid(), host(), boot(), time.Now().Round(time.Second), short(j.Command)
	text, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	dir := secret.RunDir(os.Getenv("XDG_RUNTIME_DIR"))
	if err := secret.PrivateDir(dir); err != nil {
		return nil, err
	}
	file, err := os.CreateTemp(dir, fmt.Sprintf(".%s%d-*", prefix, j.ID)) // with mode 0600
	if err != nil {
		return nil, err
	}
	f := &File{file, filepath.Join(dir, filepath.Base(file.Name())[1:])}
	_, err = file.Write(text)
	if err = errors.Join(err, lock(file, syscall.LOCK_EX)); err == nil {
		err = os.Rename(file.Name(), f.path)
	}
	if err != nil {
		os.Remove(file.Name())
		file.Close()
		return nil, err
	}
	return f, nil
}

// Remove removes the file.
func (f *File) Remove() {
	os.Remove(f.path) // one that is left is recognised by its lock
	f.lock.Close()
}

// List lists the jobs that run, the oldest first, and removes the files of those that were killed. The error is of a
// directory or file that was not read; the other jobs are listed all the same.
func List() (jobs []Job, err error) {
	for _, dir := range Dirs() {
		if _, missing := os.Lstat(dir); missing != nil {
			continue
		}
		if bad := secret.PrivateDir(dir); bad != nil {
			err = errors.Join(err, bad)
			continue
		}
		paths, bad := filepath.Glob(filepath.Join(dir, prefix+"*"))
		err = errors.Join(err, bad)
		for _, path := range paths {
			j, bad := read(path)
			err = errors.Join(err, bad)
			if j != nil {
				jobs = append(jobs, *j)
			}
		}
	}
	slices.SortFunc(jobs, func(a, b Job) int { return cmp.Or(a.Started.Compare(b.Started), cmp.Compare(a.ID, b.ID)) })
	return jobs, err
}

// Dirs are where the files of this user's jobs may be: a login has a run directory, a daemon's process may have none.
func Dirs() []string {
	session := fmt.Sprintf("/run/user/%d", os.Getuid())
	dirs := []string{secret.RunDir(os.Getenv("XDG_RUNTIME_DIR")), secret.RunDir(session), secret.RunDir("")}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// read reads the file of a job that runs on this host; nil for one of another host, and for a stale one, which it removes.
func read(path string) (*Job, error) {
	file, err := secret.OpenPrivate(path, syscall.O_NOFOLLOW|syscall.O_NONBLOCK)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // its job has just ended
	} else if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, limits.MaxRunFile))
	if err != nil {
		return nil, err
	}
	j := new(Job)
	bad := json.Unmarshal(text, j)
	switch {
	case bad == nil && j.Host != host() && (j.Boot == "" || j.Boot != boot()): // one host's name may change, and its containers have several
		return nil, nil
	case lock(file, syscall.LOCK_SH) == nil:
		if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) { // somebody else has
			return nil, err
		}
		return nil, nil
	case bad != nil:
		return nil, fmt.Errorf("%s: %w", path, bad)
	}
	return j, nil
}

// host is this machine's name, "" where it has none.
func host() string {
	name, _ := os.Hostname()
	return name
}

// boot is the number that the kernel drew when it started, "" where it shows none.
func boot() string {
	text, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text))
}

func lock(file *os.File, how int) error { return syscall.Flock(int(file.Fd()), how|syscall.LOCK_NB) }

// maxCommand bounds the bytes of a command that a file shows.
const maxCommand = 1 << 10

// short keeps the beginning of a command.
func short(command []string) []string {
	room := maxCommand
	for i, word := range command {
		if room -= len(word) + 1; room < 0 {
			return append(slices.Clone(command[:i]), "...")
		}
	}
	return command
}
