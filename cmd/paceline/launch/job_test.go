package launch

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/wire"
)

// bench is a job of shell commands and what it printed.
type bench struct {
	job            Job
	stdout, stderr lines
	said           lines
	signals        chan os.Signal
}

// lines collects output, and tells when a text has come.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
	news chan struct{}
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Write(p)
	select {
	case l.news <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// wait blocks until all the texts have come.
func (l *lines) wait(t *testing.T, texts ...string) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for _, text := range texts {
		for !strings.Contains(l.String(), text) {
			select {
			case <-l.news:
			case <-deadline:
				t.Fatalf("%q never came: %q", text, l.String())
			}
		}
	}
}

// inTheSameWay runs a test with local processes and through a remote shell.
func inTheSameWay(t *testing.T, test func(t *testing.T, shell []string)) {
	t.Run("local", func(t *testing.T) { test(t, nil) })
	t.Run("remote", func(t *testing.T) { test(t, []string{"env", "REMOTE=1"}) })
}

func newBench(t *testing.T, shell []string, commands ...string) *bench {
	b := &bench{signals: make(chan os.Signal, 2)}
	b.stdout.news, b.stderr.news, b.said.news = make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{}, 1)
	console := &Console{Stdout: &b.stdout, Stderr: &b.stderr}
	env := map[string]string{"PATH": os.Getenv("PATH")}
	for rank, command := range commands {
		label := strconv.Itoa(rank)
		b.job.Workers = append(b.job.Workers, &Task{Name: "rank " + label, Rank: &rank, Host: "here", Shell: shell, Dir: t.TempDir(), Env: env,
			Command: []string{"sh", "-c", command}, Stdout: console.Stream(label, false, nil), Stderr: console.Stream(label, true, nil)})
	}
	b.job.Start, b.job.Peers, b.job.Stop = time.Minute, 100*time.Millisecond, 500*time.Millisecond
	b.job.Say = func(format string, args ...any) { fmt.Fprintf(&b.said, format+"\n", args...) }
	return b
}

func (b *bench) run() int { return b.report().Code }

func (b *bench) report() Report { return b.job.Run(b.signals) }

// interrupted runs a job that gets signals once it has said something, and wants its exit code.
func (b *bench) interrupted(t *testing.T, want int, said []string, signals ...os.Signal) {
	t.Helper()
	code := make(chan int)
	go func() { code <- b.run() }()
	b.stdout.wait(t, said...)
	for _, sig := range signals {
		b.signals <- sig
	}
	if got := <-code; got != want {
		t.Fatal(got)
	}
}

func TestAJobThatGoesWellPrintsItsOwnOutputAlone(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, "echo out; echo err >&2", "echo two")
		if code := b.run(); code != 0 || b.said.String() != "" {
			t.Fatal(code, b.said.String())
		}
		out := b.stdout.String()
		if len(out) != len("[0]<stdout>:out\n[1]<stdout>:two\n") || !strings.Contains(out, "[0]<stdout>:out\n") || !strings.Contains(out, "[1]<stdout>:two\n") || b.stderr.String() != "[0]<stderr>:err\n" {
			t.Fatal(out, b.stderr.String())
		}
	})
}

func TestWordsReachTheCommandAsTheyAre(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, `printf '%s|' "$A" "$@"; pwd`)
		task := b.job.Workers[0]
		task.Dir = filepath.Join(t.TempDir(), "a 'b' $c")
		os.Mkdir(task.Dir, 0o755)
		task.Env = Merge(task.Env, map[string]string{"A": "it's\n\"$HOME\" `x` \\"})
		task.Command = append(task.Command, "sh", "a b", "", "$(x)", "'")
		if code := b.run(); code != 0 {
			t.Fatal(code, b.stderr.String())
		}
		want := "it's\n\"$HOME\" `x` \\|a b||$(x)|'|" + task.Dir + "\n"
		if got := strings.ReplaceAll(b.stdout.String(), "[0]<stdout>:", ""); got != want {
			t.Fatalf("%q, want %q", got, want)
		}
	})
}

func TestFirstFailingRankGivesTheExitCodeAndTheOthersAreStopped(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, "sleep 60", "exit 3", "trap '' TERM; sleep 60; sleep 60")
		if code := b.run(); code != 3 {
			t.Fatal(code)
		}
		if said := b.said.String(); strings.Count(said, "\n") != 1 || !strings.HasPrefix(said, "rank 1 on here (pid ") || !strings.Contains(said, ") ended with exit code 3; the others (2)") {
			t.Fatal(said)
		}
	})
}

func TestOthersMayEndByThemselvesAfterAFailure(t *testing.T) {
	heard := filepath.Join(t.TempDir(), "heard")
	b := newBench(t, nil, "exit 3", "until [ -e "+heard+" ]; do sleep 0.02; done; echo found out; exit 9")
	b.job.Peers = time.Minute
	code := make(chan int, 1)
	go func() { code <- b.run() }()
	b.said.wait(t, ") ended with exit code 3;")
	if err := os.WriteFile(heard, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code := <-code; code != 3 || b.stdout.String() != "[1]<stdout>:found out\n" || !strings.Contains(b.said.String(), ") ended with exit code 9 too\n") {
		t.Fatal(code, b.stdout.String(), b.said.String())
	}
}

func TestDeathBySignalIsTold(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, "kill -9 $$")
		if code := b.run(); code != 137 || !strings.Contains(b.said.String(), "signal 9") {
			t.Fatal(code, b.said.String())
		}
	})
}

func TestCommandThatIsNotThere(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, "")
		b.job.Workers[0].Command = []string{"no-such-command"}
		if code := b.run(); code != 127 || !strings.Contains(b.said.String()+b.stderr.String(), "no-such-command") {
			t.Fatal(code, b.said.String(), b.stderr.String())
		}
	})
}

func TestInterruptIsPassedOnToWholeGroups(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		child := "trap 'echo child; exit 0' INT; echo ready; while :; do sleep 0.05; done"
		b := newBench(t, shell, "trap 'echo parent; exit 0' INT; sh -c '"+strings.ReplaceAll(child, "'", `'\''`)+"'; sleep 60", child)
		b.job.Stop = time.Minute
		b.interrupted(t, 130, []string{"[0]<stdout>:ready", "[1]<stdout>:ready"}, syscall.SIGINT)
		if out := b.stdout.String(); !strings.Contains(out, "[1]<stdout>:child\n") || !strings.Contains(out, "[0]<stdout>:child\n") || !strings.Contains(out, "[0]<stdout>:parent\n") {
			t.Fatal(out)
		}
	})
}

func TestProcessesThatIgnoreSignalsAreKilledInTheEnd(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, "trap '' INT TERM; echo ready; while :; do sleep 0.1; done")
		b.interrupted(t, 130, []string{"ready"}, syscall.SIGINT)
	})
}

func TestInterruptWhileProcessesAreStarted(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, "echo started", "echo started")
		b.signals <- syscall.SIGTERM
		if code := b.run(); code != 143 || b.stdout.String() != "" {
			t.Fatal(code, b.stdout.String())
		}
	})
}

func TestSecondInterruptEndsAtOnce(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, "trap '' INT TERM; echo ready; while :; do sleep 0.1; done")
		b.job.Stop = time.Hour
		b.interrupted(t, 130, []string{"ready"}, syscall.SIGINT, syscall.SIGINT)
	})
}

func TestBigOutputArrivesWhole(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		const count = 200000
		b := newBench(t, shell, fmt.Sprintf("seq %d", count), fmt.Sprintf("seq %d >&2", count))
		if code := b.run(); code != 0 {
			t.Fatal(code)
		}
		want := sha256.New()
		for i := range count {
			fmt.Fprintln(want, i+1)
		}
		for prefix, out := range map[string]string{"[0]<stdout>:": b.stdout.String(), "[1]<stderr>:": b.stderr.String()} {
			if got := sha256.Sum256([]byte(strings.ReplaceAll(out, prefix, ""))); hex.EncodeToString(got[:]) != hex.EncodeToString(want.Sum(nil)) {
				t.Fatal("output of", prefix, "differs")
			}
		}
	})
}

// slow is a console that is not read for a while.
type slow struct {
	lines
	once sync.Once
}

func (s *slow) Write(p []byte) (int, error) {
	s.once.Do(func() { time.Sleep(drainTime + drainTime/4) })
	return s.lines.Write(p)
}

func TestTheEndOfTheOutputArrivesHoweverSlowlyItIsRead(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		t.Parallel()
		b := newBench(t, shell, "seq 15000")
		var out slow
		b.job.Workers[0].Stdout = (&Console{Stdout: &out}).Stream("0", false, nil)
		if code := b.run(); code != 0 || !strings.HasSuffix(out.String(), "[0]<stdout>:15000\n") {
			t.Fatal(code, len(out.String()))
		}
	})
}

// sshd refuses connections where many have not said who they are (MaxStartups).
func TestRemoteShellsOfOneHostComeAFewAtATime(t *testing.T) {
	t.Setenv("DOOR", t.TempDir())
	door := fmt.Sprintf(`touch $DOOR/$$; [ $(ls $DOOR | wc -l) -le %d ] || exit 255; sleep 0.1; rm $DOOR/$$; exec "$@"`, shellsAtOnce)
	b := newBench(t, []string{"sh", "-c", door, "ssh"}, slices.Repeat([]string{"echo $$"}, 3*shellsAtOnce)...)
	if r := b.report(); r.Code != 0 || strings.Count(b.stdout.String(), "\n") != 3*shellsAtOnce {
		t.Errorf("%+v", r)
	}
}

// A signal finds some shells on their way, and others that are not to be started any more.
func TestInterruptWhileRemoteShellsHaveNoTurnYet(t *testing.T) {
	b := newBench(t, []string{"sh", "-c", `echo > $DOOR/$$; exec sleep 1000`}, slices.Repeat([]string{"true"}, 2*shellsAtOnce)...)
	door := t.TempDir()
	t.Setenv("DOOR", door)
	come := func() int { there, _ := os.ReadDir(door); return len(there) }
	go func() {
		for come() < shellsAtOnce {
			time.Sleep(5 * time.Millisecond)
		}
		b.signals <- syscall.SIGTERM
	}()
	if code := b.run(); code != 143 || come() != shellsAtOnce {
		t.Errorf("code %d, %d shells came", code, come())
	}
}

func TestWhatARankLeavesBehindIsEnded(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		b := newBench(t, shell, "sleep 100 & echo $!")
		if code := b.run(); code != 0 {
			t.Fatal(code)
		}
		gone(t, pidIn(t, b))
	})
}

func TestWhatARankLeavesBehindMayTidyUp(t *testing.T) {
	inTheSameWay(t, func(t *testing.T, shell []string) {
		left := filepath.Join(t.TempDir(), "left")
		tidy := "trap '' TERM; touch " + left + "; echo $$; while kill -0 $1 2>/dev/null; do sleep 0.05; done; sleep 1.2; rm " + left
		b := newBench(t, shell, "sh -c "+Quote(tidy)+" sh $$ & exec sleep 100")
		b.job.Stop = time.Second // the rank itself ends at once
		b.interrupted(t, 143, []string{"[0]<stdout>:"}, syscall.SIGTERM)
		gone(t, pidIn(t, b))
		if _, err := os.Stat(left); !os.IsNotExist(err) {
			t.Fatal("it was killed before it had tidied up", err)
		}
	})
}

// A second signal leaves no time to tidy up.
func TestWhatARankLeavesBehindEndsWithTheSecondSignal(t *testing.T) {
	b := newBench(t, nil, `sh -c 'trap "" TERM; echo $$; while :; do sleep 1000; done' & exec sleep 100`)
	b.interrupted(t, 143, []string{"[0]<stdout>:"}, syscall.SIGTERM, syscall.SIGTERM)
	gone(t, pidIn(t, b))
}

// pidIn is what a job of one rank has printed, a process's number.
func pidIn(t *testing.T, b *bench) int {
	t.Helper()
	pid, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(b.stdout.String(), "[0]<stdout>:")))
	if err != nil {
		t.Fatal(b.stdout.String())
	}
	return pid
}

func TestServersEndWithTheWorkers(t *testing.T) {
	serves := filepath.Join(t.TempDir(), "serves")
	b := newBench(t, nil, "until [ -e "+serves+" ]; do sleep 0.02; done", "trap 'echo stopped; exit 0' TERM; : > "+serves+"; while :; do sleep 0.05; done")
	b.job.Workers, b.job.Servers = b.job.Workers[:1], b.job.Workers[1:]
	b.job.Stop = time.Minute
	if code := b.run(); code != 0 || b.said.String() != "" || !strings.Contains(b.stdout.String(), "stopped") {
		t.Fatal(code, b.said.String(), b.stdout.String())
	}
}

func TestAServerThatEndsEarlyIsAFailure(t *testing.T) {
	b := newBench(t, nil, "sleep 60", "exit 0")
	b.job.Workers, b.job.Servers = b.job.Workers[:1], b.job.Workers[1:]
	b.job.Servers[0].Name = "the server"
	if code := b.run(); code != 1 || !strings.Contains(b.said.String(), "the server on here") {
		t.Fatal(code, b.said.String())
	}
}

func TestARemoteShellThatFailsIsQuoted(t *testing.T) {
	b := newBench(t, []string{"sh", "-c", "echo no route to there >&2; exit 255"}, "true")
	if code := b.run(); code != 255 {
		t.Fatal(code)
	}
	if said := b.said.String(); !strings.Contains(said, "rank 0 on here could not be started by") || !strings.Contains(said, "ended with exit code 255: no route to there") {
		t.Fatal(said)
	}
}

func TestARemoteShellThatNeverAnswersIsGivenUp(t *testing.T) {
	b := newBench(t, []string{"sh", "-c", "sleep 60"}, "true")
	b.job.Start = 200 * time.Millisecond
	if code := b.run(); code != 1 || !strings.Contains(b.said.String(), "rank 0 on here does not run after 200ms: no answer from") {
		t.Fatal(code, b.said.String())
	}
}

func TestARemoteShellThatTalksALotIsShown(t *testing.T) {
	b := newBench(t, []string{"sh", "-c", "seq 100000 >&2; exit 9"}, "true")
	if code := b.run(); code != 9 || !strings.Contains(b.said.String(), "exit code 9: 1") && !strings.Contains(b.stderr.String(), "[0]<stderr>:1\n") {
		t.Fatal(code, b.said.String(), len(b.stderr.String()))
	}
}

// TestSignalsReachARemoteProcessWhoseOutputNobodyReads: the console takes no output, like a pipe to a pager.
func TestSignalsReachARemoteProcessWhoseOutputNobodyReads(t *testing.T) {
	b := newBench(t, []string{"env"}, `echo $$ > pid; echo more; sleep 100`)
	read, blocked := io.Pipe()
	b.job.Workers[0].Stdout = (&Console{Stdout: blocked}).Stream("0", false, nil)
	ended := make(chan int, 1)
	go func() { ended <- b.run() }()
	io.ReadFull(read, make([]byte, 1)) // the console is at the rest of the line
	b.signals <- syscall.SIGINT
	written, err := os.ReadFile(filepath.Join(b.job.Workers[0].Dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(written)))
	gone(t, pid)
	read.Close()
	if code := <-ended; code != 128+int(syscall.SIGINT) {
		t.Error(code)
	}
}

func TestARemoteDirectoryThatIsNotThereIsNamed(t *testing.T) {
	b := newBench(t, []string{"env"}, "true")
	b.job.Workers[0].Dir = "/no/such/dir"
	if code := b.run(); code == 0 || !strings.Contains(b.said.String(), "/no/such/dir") {
		t.Fatal(code, b.said.String())
	}
}

// TestNoOrphansWhenTheLauncherIsKilled runs a job in a process of its own, which is then killed.
func TestNoOrphansWhenTheLauncherIsKilled(t *testing.T) {
	for _, shell := range []string{"", "env"} {
		t.Run("shell "+shell, func(t *testing.T) {
			out := &lines{news: make(chan struct{}, 1)}
			launcher := exec.Command(os.Args[0], "-test.run=^$")
			launcher.Env = append(os.Environ(), "LAUNCH_TEST_VICTIM=1", "LAUNCH_TEST_SHELL="+shell)
			launcher.Stdout = out
			launcher.WaitDelay = time.Second
			if err := launcher.Start(); err != nil {
				t.Fatal(err)
			}
			out.wait(t, "parent ", "child ", "end")
			launcher.Process.Kill()
			launcher.Wait()
			for _, line := range strings.Split(out.String(), "\n") {
				if words := strings.Fields(line); len(words) == 2 {
					pid, _ := strconv.Atoi(words[1])
					gone(t, pid)
				}
			}
		})
	}
}

func TestMain(m *testing.M) {
	if os.Getenv("LAUNCH_TEST_VICTIM") != "" {
		victim()
		return
	}
	os.Exit(m.Run())
}

func victim() {
	task := &Task{Name: "rank 0", Host: "here", Dir: "/", Env: Variables(os.Environ()), Command: []string{"sh", "-c", `echo "parent $$"; sleep 100 & echo "child $!"; echo end; wait`}}
	task.Shell = strings.Fields(os.Getenv("LAUNCH_TEST_SHELL"))
	if len(task.Shell) == 0 {
		task.Shell = nil
	}
	console := &Console{Stdout: stripped{}, Stderr: os.Stderr}
	task.Stdout, task.Stderr = console.Stream("0", false, nil), console.Stream("0", true, nil)
	job := Job{Workers: []*Task{task}, Start: time.Minute, Peers: time.Minute, Stop: time.Minute, Say: func(string, ...any) {}}
	job.Run(nil)
}

type stripped struct{}

func (stripped) Write(p []byte) (int, error) {
	os.Stdout.WriteString(strings.ReplaceAll(string(p), "[0]<stdout>:", ""))
	return len(p), nil
}

// gone waits until a process has ended.
func gone(t *testing.T, pid int) {
	t.Helper()
	if pid <= 1 {
		t.Fatal("no pid")
	}
	for deadline := time.Now().Add(20 * time.Second); ; {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d is still there: %s", pid, stat)
		}
		time.Sleep(10 * time.Millisecond) // another process's end cannot be waited for otherwise
	}
}

// TestAVerboseLaunchSaysWhereTheJobIsAndHowFar, one line after the other.
func TestAVerboseLaunchSaysWhereTheJobIsAndHowFar(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	said := lines{news: make(chan struct{}, 1)}
	signals := filepath.Join(t.TempDir(), "end")
	if err := syscall.Mkfifo(signals, 0o600); err != nil {
		t.Fatal(err)
	}
	ended := make(chan int, 1)
	go func() {
		report, err := Run(Options{
			Command: []string{"cat", signals}, Env: map[string]string{"PATH": os.Getenv("PATH")}, Processes: 1, Verbose: true, Every: time.Millisecond,
			Say: func(format string, args ...any) { fmt.Fprintf(&said, format+"\n", args...) },
		})
		if err != nil {
			t.Error(err)
		}
		ended <- report.Code
	}()
	said.wait(t, "the scheduler is at 127.0.0.1:", fmt.Sprintf("`paceline status %d` shows the job\n", os.Getpid()), "rank 0 on localhost: cat ", "forming, waiting for rank 0 of 1; 0 of 1 workers have come")
	os.WriteFile(signals, nil, 0)
	if code := <-ended; code != 0 {
		t.Error(code)
	}
}

func TestAnElasticJobEndsWellWithoutTheRanksThatItLost(t *testing.T) {
	const later = "until [ -e $said ]; do sleep 0.02; done; " // when the job has said something
	lost := func(rank int) node.News { return node.News{Lost: &wire.Node{Role: wire.RoleWorker, Rank: rank}} }
	for name, c := range map[string]struct {
		commands []string
		code     int
		said     []string
		servers  []string
		report   []string
		given    func(j *Job) // nil for nothing
	}{
		"one is killed":   {[]string{"sleep 0.3; echo well", "kill -9 $$", "true"}, 0, []string{"rank 1 on here (pid ", "(SIGKILL, which also is what the kernel sends when memory runs out); the job goes on without it\n", "the job ended well; it lost rank 1 on here\n"}, nil, []string{"lost rank 1"}, nil},
		"the last fails":  {[]string{"true", "sleep 0.3; exit 3"}, 0, []string{"ended with exit code 3; the job goes on without it", "it lost rank 1 on here\n"}, nil, []string{"lost rank 1"}, nil},
		"none ends well":  {[]string{"exit 4", later + "exit 3"}, 3, []string{"ended with exit code 4; the job goes on without it", "ended with exit code 3\n"}, nil, []string{"lost rank 0", "failed rank 1"}, nil},
		"nobody is lost":  {[]string{"true", "true"}, 0, nil, nil, nil, nil},
		"a server ends":   {[]string{later + "echo well", later}, 0, []string{"server 0 on here (pid ", "(SIGKILL, which also is what the kernel sends when memory runs out); the job goes on without it\n", "the job ended well; it lost server 0 on here\n"}, []string{"kill -9 $$", "sleep 60"}, []string{"lost server 0"}, nil},
		"the last server": {[]string{"sleep 60", "sleep 60"}, 3, []string{"server 0 on here (pid ", "ended with exit code 3; the others (2) are given"}, []string{"sleep 0.5; exit 3"}, []string{"failed server 0"}, nil},
		"servers leave":   {[]string{later + "sleep 0.3; echo well", later}, 0, []string{"server 0 on here (pid ", "server 1 on here (pid ", ") has left; the job goes on without it\n"}, []string{"true", "true"}, nil, nil},
		"before it formed": {[]string{"sleep 60", "exit 3"}, 3, []string{"ended with exit code 3; the others (1) are given"}, nil, []string{"failed rank 1"}, func(j *Job) {
			j.Formed = func() bool { return false }
		}},
		"one is frozen": {[]string{"true", "kill -STOP $$"}, 0, []string{"rank 1 on here (pid ", "was given up by the others, and had not ended when they had: it is stopped\n", "the job ended well; it lost rank 1 on here\n"}, nil, []string{"lost rank 1"}, func(j *Job) {
			j.News.tell(lost(1))
		}},
		"one is frozen for long": {[]string{"true", "kill -STOP $$"}, 0, []string{"had not ended when they had: it is stopped\n", "it lost rank 1 on here\n"}, nil, []string{"lost rank 1"}, func(j *Job) {
			time.AfterFunc(500*time.Millisecond, func() { j.News.tell(lost(1)) }) // when the other has ended
		}},
		"the last is frozen": {[]string{"kill -STOP $$", "exit 3"}, 137, []string{"rank 0 on here (pid ", "had not ended when they had: it is stopped\n"}, nil, []string{"lost rank 1", "failed rank 0"}, func(j *Job) {
			say := j.Say
			j.Say = func(format string, args ...any) { // that rank 1 has ended
				say(format, args...)
				j.News.tell(lost(0))
			}
		}},
		"one fails and is given up": {[]string{"exit 4", later + "sleep 0.2; exit 3"}, 3, []string{"rank 0 on here (pid ", "ended with exit code 4", "ended with exit code 3\n"}, nil, []string{"lost rank 0", "failed rank 1"}, func(j *Job) {
			j.Peers = time.Minute
			say := j.Say
			j.Say = func(format string, args ...any) {
				say(format, args...)
				j.News.tell(lost(1)) // its connections have ended; its process is about to
			}
		}},
		"one is woken, and in the next round": {[]string{"true", "sleep 1"}, 0, nil, nil, nil, func(j *Job) {
			j.News.tell(lost(1))
			j.News.tell(node.News{Began: []int{0, 1}})
		}},
		"a server from elsewhere": {[]string{later, later}, 0, []string{"the job ended well; it lost server at tcp a:1 on a\n"}, []string{"sleep 60"}, []string{"lost server at tcp a:1"}, func(j *Job) {
			server := func(host string, pid int) node.News {
				return node.News{Lost: &wire.Node{Role: wire.RoleServer, Rank: -1, Host: host, PID: pid, Addresses: address.List{{Kind: "tcp", At: "a:1"}}}}
			}
			j.News.tell(server("a", 7))
			j.Say("lost\n")
		}},
		"a server before it formed": {[]string{"sleep 60", "sleep 60"}, 1, []string{"server 0 on here (pid ", "the others (2) are given"}, []string{"true"}, []string{"failed server 0"}, func(j *Job) {
			j.Formed = func() bool { return false }
		}},
		"it never starts": {[]string{"sleep 60", ""}, 127, []string{"cannot be started"}, nil, []string{"failed rank 1"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, nil, c.commands...)
			b.job.Elastic = true
			file, say := filepath.Join(t.TempDir(), "said"), b.job.Say
			b.job.Workers[0].Env["said"] = file // of all workers
			b.job.Say = func(format string, args ...any) {
				say(format, args...)
				if err := os.WriteFile(file, nil, 0o600); err != nil {
					t.Error(err)
				}
			}
			if c.servers != nil {
				s := newBench(t, nil, c.servers...)
				for i, task := range s.job.Workers {
					task.Name, task.Rank = fmt.Sprint("server ", i), nil
				}
				b.job.Servers = s.job.Workers
			}
			if c.commands[1] == "" {
				b.job.Workers[1].Command = []string{"/no/such/command"}
			}
			if b.job.News = newInbox(); c.given != nil {
				c.given(&b.job)
			}
			r, said := b.report(), b.said.String()
			if r.Code != c.code || len(c.said) == 0 && said != "" {
				t.Fatal(r.Code, said)
			}
			for kind, list := range map[string][]Failure{"lost ": r.Lost, "failed ": r.Failed} {
				for _, f := range list {
					if !slices.Contains(c.report, kind+f.Name) || f.Why == "" || f.Code == 0 && f.Rank != nil {
						t.Errorf("%s%+v is not in %q", kind, f, c.report)
					}
				}
			}
			if len(r.Lost)+len(r.Failed) != len(c.report) || r.Ranks != len(c.commands) || r.Error != "" {
				t.Errorf("%+v, want %q", r, c.report)
			}
			for _, text := range c.said {
				if !strings.Contains(said, text) {
					t.Errorf("%q lacks %q", said, text)
				}
			}
		})
	}
}

// TestAFrozenRankIsNotWaitedForWhereTheOthersEndWell: their scripts were done, or caught the error.
func TestAFrozenRankIsNotWaitedForWhereTheOthersEndWell(t *testing.T) {
	b := newBench(t, nil, "true", "kill -STOP $$")
	b.job.News = newInbox()
	b.job.News.tell(node.News{Lost: &wire.Node{Role: wire.RoleWorker, Rank: 1}})
	r, said := b.report(), b.said.String()
	if r.Code != 128+int(syscall.SIGKILL) || len(r.Lost) > 0 || len(r.Failed) != 1 || r.Failed[0].Name != "rank 1" {
		t.Errorf("%+v", r)
	}
	if !strings.Contains(said, "was given up by the others, and had not ended when they had: it is stopped\n") {
		t.Error(said)
	}
}

// TestALostServerIsFoundByHostAndProcess: on another host, or in another container, a process may have the same number.
func TestALostServerIsFoundByHostAndProcess(t *testing.T) {
	own := &Task{Name: "server", Host: "here"}
	r := newRun(&Job{Servers: []*Task{own}, Elastic: true}, nil)
	r.alive[own] = &process{}
	r.alive[own].pid.Store(7)
	for _, host := range []string{"there", "here"} {
		r.hear(node.News{Lost: &wire.Node{Role: wire.RoleServer, Host: host, PID: 7}})
	}
	if len(r.lost) != 1 || r.lost[0].Host != "there" || !slices.Equal(r.givenUp, []*Task{own}) {
		t.Errorf("lost %v, given up %v", r.lost, r.givenUp)
	}
}

// A script may leave a process behind at each checkpoint, for days.
func TestWhatARankLeavesBehindIsBuriedWhileItRuns(t *testing.T) {
	b := newBench(t, nil, `for i in 1 2 3 4 5 6 7 8; do (true &); done; (setsid true &); sleep 0.5; echo left; sleep 1000`, "sleep 1000")
	done := make(chan Report)
	go func() { done <- b.report() }()
	b.stdout.wait(t, "left")
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) { // the kernel tells nobody
		ended := endedChildren(t)
		if len(ended) == 0 {
			break
		}
		if time.Now().After(until) {
			t.Errorf("nobody has waited for %v", ended)
			break
		}
	}
	b.signals <- syscall.SIGTERM
	if r := <-done; r.Code != 143 || len(r.Failed) != 0 {
		t.Errorf("%+v: %s", r, b.said.String())
	}
}

// endedChildren are the children of this process for which nobody has waited.
func endedChildren(t *testing.T) (ended []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, _ := os.ReadFile(file)                   // it may have gone
		_, after, _ := strings.Cut(string(text), ") ") // the name may hold spaces
		if strings.HasPrefix(after, fmt.Sprintf("Z %d ", os.Getpid())) {
			ended = append(ended, string(text))
		}
	}
	return ended
}
