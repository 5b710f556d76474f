package runfile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// room gives the test a run directory of its own, which is yet to be made.
func room(t *testing.T) string {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	dir := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", dir)
	return filepath.Join(dir, "paceline")
}

// listed are the jobs that List finds, by their schedulers.
func listed(t *testing.T) []string {
	t.Helper()
	jobs, err := List()
	if err != nil {
		t.Fatal(err)
	}
	var schedulers []string
	for _, j := range jobs {
		schedulers = append(schedulers, j.Scheduler)
	}
	return schedulers
}

func publish(t *testing.T, scheduler string) *File {
	t.Helper()
	f, err := Publish(Job{Scheduler: scheduler, Command: []string{"train"}, Env: map[string]string{"PACELINE_JOB_SECRET": "x"}})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestAJobIsListedWhileItRuns(t *testing.T) {
	dir := room(t)
	if got := listed(t); len(got) != 0 {
		t.Fatal(got)
	}
	a, b := publish(t, "a:1"), publish(t, "b:2")
	if got := strings.Join(listed(t), " "); got != "a:1 b:2" && got != "b:2 a:1" {
		t.Fatal(got)
	}
	files, _ := os.ReadDir(dir)
	for _, f := range files {
		if info, err := f.Info(); err != nil || info.Mode() != 0o600 {
			t.Error(f.Name(), info.Mode(), err)
		}
	}
	a.Remove()
	if got := listed(t); len(got) != 1 || got[0] != "b:2" {
		t.Fatal(got)
	}
	b.Remove()
	if files, _ := os.ReadDir(dir); len(files) != 0 {
		t.Fatal(files)
	}
}

// TestTheFileOfAKilledProcessIsRemoved has lost its lock.
func TestTheFileOfAKilledProcessIsRemoved(t *testing.T) {
	dir := room(t)
	f := publish(t, "a:1")
	f.lock.Close()
	if got := listed(t); len(got) != 0 {
		t.Fatal(got)
	}
	if files, _ := os.ReadDir(dir); len(files) != 0 {
		t.Fatal(files)
	}
}

// TestTheFilesOfOtherHostsAreLeftAlone: a directory that hosts share shows nothing of whether their jobs run.
func TestTheFilesOfOtherHostsAreLeftAlone(t *testing.T) {
	dir := room(t)
	f := publish(t, "a:1")
	text, err := os.ReadFile(f.path)
	if err != nil {
		t.Fatal(err)
	}
	f.Remove()
	other := filepath.Join(dir, "job-1-other")
	if err := os.WriteFile(other, []byte(strings.NewReplacer(`"host":"`, `"host":"not-`, `"boot":"`, `"boot":"not-`).Replace(string(text))), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := listed(t); len(got) != 0 {
		t.Error(got)
	}
	if _, err := os.Stat(other); err != nil {
		t.Error(err)
	}
}

func TestWhatOthersCanTouchIsRefused(t *testing.T) {
	dir := room(t)
	f := publish(t, "a:1")
	defer f.Remove()
	os.Chmod(f.path, 0o644)
	if jobs, err := List(); len(jobs) != 0 || err == nil || !strings.Contains(err.Error(), "can be read or written by others") {
		t.Error(jobs, err)
	}
	os.Chmod(f.path, 0o600)
	os.Chmod(dir, 0o770)
	if jobs, err := List(); len(jobs) != 0 || err == nil || !strings.Contains(err.Error(), "nobody else can enter") {
		t.Error(jobs, err)
	}
	if _, err := Publish(Job{}); err == nil {
		t.Error("a job is published where others can write")
	}
}

func TestALinkIsNotFollowed(t *testing.T) {
	dir := room(t)
	defer publish(t, "a:1").Remove()
	elsewhere := filepath.Join(t.TempDir(), "file")
	os.WriteFile(elsewhere, []byte("{}"), 0o600)
	if err := os.Symlink(elsewhere, filepath.Join(dir, prefix+"link")); err != nil {
		t.Fatal(err)
	}
	if jobs, err := List(); len(jobs) != 1 || err == nil {
		t.Error(jobs, err)
	}
}

func TestALongCommandIsCut(t *testing.T) {
	room(t)
	words := make([]string, 100_000)
	f, err := Publish(Job{Command: words})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Remove()
	jobs, err := List()
	if err != nil || len(jobs) != 1 || len(jobs[0].Command) != maxCommand+1 || jobs[0].Command[maxCommand] != "..." {
		t.Fatal(len(jobs), err)
	}
}
