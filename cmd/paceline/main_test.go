package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/version"
)

// The tests run this binary as the command itself, in processes of its own.
func TestMain(m *testing.M) {
	if os.Getenv("PACELINE_TEST_COMMAND") == "" {
		os.Exit(m.Run())
	}
	os.Unsetenv("PACELINE_TEST_COMMAND")
	main()
}

// result is what a command gave.
type result struct {
	code           int
	stdout, stderr string
}

// command is `paceline args...`, in a directory and with a run directory of its own. $PACELINE in the
// commands that it runs is the command itself.
func command(t *testing.T, args ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	c := exec.Command(self, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), "PACELINE_TEST_COMMAND=1", "XDG_RUNTIME_DIR="+dir, "TMPDIR="+dir, "SELF="+self)
	c.WaitDelay = 10 * time.Second
	return c
}

// run runs a command to its end, and meanwhile what is given with it.
func run(t *testing.T, c *exec.Cmd, meanwhile ...func()) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(60*time.Second, func() { c.Process.Signal(syscall.SIGQUIT) })
	defer late.Stop()
	for _, f := range meanwhile {
		go f()
	}
	var failed *exec.ExitError
	if err := c.Wait(); err != nil && !errors.As(err, &failed) {
		t.Fatal(err, stderr.String())
	}
	return result{c.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

func paceline(t *testing.T, args ...string) result { t.Helper(); return run(t, command(t, args...)) }

func (r result) check(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || !strings.Contains(r.stdout, stdout) || !strings.Contains(r.stderr, stderr) || stderr == "" && r.stderr != "" {
		t.Fatalf("exit code %d\nstdout %q\nstderr %q", r.code, r.stdout, r.stderr)
	}
}

func TestRunPrintsNothingButTheWorkersOutput(t *testing.T) {
	r := paceline(t, "run", "-np", "1", "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE; echo oh >&2")
	r.check(t, 0, "", "[0]<stderr>:oh\n")
	if r.stdout != "[0]<stdout>:0 of 1\n" || r.stderr != "[0]<stderr>:oh\n" {
		t.Fatalf("%+v", r)
	}
}

func TestRunEndsWithTheFailingRanksCode(t *testing.T) {
	paceline(t, "run", "-np", "2", "sh", "-c", `[ "$PACELINE_RANK" = 0 ] || exit 7; sleep 1`).
		check(t, 7, "", "paceline run: rank 1 on localhost (pid ")
}

func TestRunSaysWhatIsWrongWithItsArguments(t *testing.T) {
	for args, want := range map[string]string{
		"run":                                "no command to run",
		"run -np 2":                          "no command to run",
		"run --what true":                    "there is no flag --what: paceline run --help lists the flags",
		"run --hots a true":                  "there is no flag --hots: did you mean --hosts?",
		"run -verbose true":                  "there is no flag -verbose: did you mean --verbose?",
		"run -np 0 true":                     `-np "0": allowed are whole numbers from 1 to 16384`,
		"run -np two true":                   `-np "two": allowed are whole numbers`,
		"run --num-proc= true":               `-np "": allowed are whole numbers`,
		"run -np":                            "-np needs a value: number of processes",
		"run -p 0 true":                      `--ssh-port "0": allowed are whole numbers from 1 to 65535`,
		"run --verbose=maybe true":           `--verbose "maybe": allowed are true and false`,
		"run x.py --epochs 3":                "there is no file x.py in /",
		"run ./x.py":                         "there is no file ./x.py in /",
		"run -np2x true":                     `-np "2x": allowed are whole numbers`,
		"run -np99999 true":                  `-np "99999": allowed are whole numbers`,
		"bench allreduce -npx":               `-np "x": allowed are whole numbers`,
		"run --master-port 99999999 true":    `--master-port "99999999": allowed are whole numbers from 1 to 65535`,
		"run --master-port 0 true":           `--master-port "0": allowed are whole numbers from 1 to 65535`,
		"run --master-port 22x true":         `--master-port "22x": allowed are whole numbers from 1 to 65535`,
		"run --hosts= true":                  "--hosts is empty: hosts and their slots",
		"run --servers a:99999 true":         `--servers: the port of "a:99999" is not one from 1 to 65535`,
		"run --listen x true":                `--listen "x": allowed is host:port`,
		"run --scheduler x true":             `--scheduler "x": allowed is host:port`,
		"server --scheduler x":               `--scheduler "x": allowed is host:port`,
		"scheduler --listen x":               `--listen "x": allowed is host:port`,
		"scheduler --listen 127.0.0.1:0":     `--listen "127.0.0.1:0": nodes have to know the port`,
		"scheduler --listen 127.0.0.1:99999": `--listen "127.0.0.1:99999": allowed is host:port`,
		"scheduler --listen 127.0.0.1:1 --num-servers -3": `--num-servers "-3": allowed are 0 to`,
		"info --json=":                     "--json is empty",
		"timeline merge":                   "name the timelines to merge",
		"bench allreduce --duration -1s":   "a time is 0 or more",
		"rnu":                              `there is no command "rnu": did you mean "paceline run"?`,
		"rnu -np 2 python x.py":            `there is no command "rnu": did you mean "paceline run"?`,
		"bench allreduc -np 2":             `did you mean "paceline bench allreduce"?`,
		"train":                            "the commands are ",
		"x.py":                             `did you mean "paceline run -np 2 python x.py"?`,
		"bench codecs":                     `did you mean "paceline bench codec"?`,
		"bench allreduce -np 2,x":          `-np "2,x": allowed are whole numbers from 1 to 16384, with commas between`,
		"bench allreduce --num-servers=-1": `--num-servers "-1": allowed are whole numbers from 0`,
		"bench codec --json x.json":        "to write the JSON to that file, give --json=x.json",
		"sim --json x.json":                "to write the JSON to that file, give --json=x.json",
		"run --nproc_per_node 2 true":      "there is no flag --nproc_per_node: did you mean -np?",
		"run --nproc-per-node=2 true":      "did you mean -np?",
		"bench codec --json=/no/dir/x":     "--json: open /no/dir/x",
		"bench placement --models foo":     `--models "foo": known are: alexnet, resnet50`,
		"bench barrier --duration 3":       "there is no flag --duration",
		"sim --worker 3":                   "did you mean -np?",
		"sim --latency soon":               `--latency "soon": allowed is a time with its unit`,
		"sim --seed -1":                    `--seed "-1": allowed is a whole number from 0`,
		"info x":                           `unexpected argument "x"`,
		"run -np 3 -H localhost:2 true":    "3 processes do not fit on hosts with 2 slots",
		"run -np -1 true":                  "allowed are whole numbers",
		"run -np 16385 true":               "allowed are whole numbers",
		"run -H a;b true":                  "is not the name of a host",
		"run --hostfile /no/file true":     "/no/file",
		"run --max-np 3 true":              "give --min-np too",
		"run --start-timeout soon true":    `--start-timeout "soon": allowed is a number of seconds`,
		"run --servers a:b:c true":         `--servers: "a:b:c" is not a host`,
		"run --config-file /no/file true":  "/no/file",
		"run no-such-command":              `rank 0 on localhost cannot be started: there is no program "no-such-command" on the PATH`,
		"scheduler":                        "--listen host:port",
		"server":                           "a server needs the scheduler's address",
		"scheduler --listen 192.0.2.1:7":   "so it needs a secret: set PACELINE_JOB_SECRET",
		"status":                           "give --scheduler host:port for one elsewhere",
		"top":                              "no job of this user runs on this machine",
		"run --network-interfaces no0 -H 192.0.2.9:1 true": `--network-interfaces: no interface or address "no0" on this machine`,
	} {
		if r := paceline(t, strings.Fields(args)...); r.code == 0 || !strings.Contains(r.stderr, want) || r.stdout != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}

func TestFlagsWithoutEffectAreNamedInOneLine(t *testing.T) {
	paceline(t, "run", "--gloo", "--cycle-time-ms", "3", "-np", "1", "true").
		check(t, 0, "", "paceline run: --gloo, --cycle-time-ms: without effect here\n")
}

func TestRunWritesEachRanksOutputToFilesToo(t *testing.T) {
	c := command(t, "run", "-np", "11", "--output-filename", "out", "sh", "-c", "echo $PACELINE_RANK; echo no >&2")
	if r := run(t, c); r.code != 0 || !strings.Contains(r.stdout, "[10]<stdout>:10\n") {
		t.Fatalf("%+v", r)
	}
	for file, want := range map[string]string{"rank.03/stdout": "3\n", "rank.10/stderr": "no\n"} {
		if got, err := os.ReadFile(filepath.Join(c.Dir, "out", file)); err != nil || string(got) != want {
			t.Error(file, string(got), err)
		}
	}
}

// fifo makes a pipe in a command's directory: reading it waits until what the command runs has written to it.
func fifo(t *testing.T, c *exec.Cmd, name string) (path string) {
	t.Helper()
	path = filepath.Join(c.Dir, name)
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestRunInterruptedEndsWithTheSignalsCode(t *testing.T) {
	c := command(t, "run", "-np", "2", "sh", "-c", "trap 'exit 0' INT; echo > ready.$PACELINE_RANK; while :; do sleep 0.05; done")
	ready := []string{fifo(t, c, "ready.0"), fifo(t, c, "ready.1")}
	run(t, c, func() {
		for _, name := range ready {
			os.ReadFile(name) // until the rank has written to it
		}
		c.Process.Signal(syscall.SIGINT)
	}).check(t, 130, "", "")
}

// `| tee log` ends at Ctrl-C, and then nobody reads what the ranks still say.
func TestRanksEndByThemselvesThoughNobodyReadsTheirOutputAnyMore(t *testing.T) {
	c := command(t, "run", "sh", "-c", "trap 'echo saving; echo saving >&2; sleep 0.3; echo saved > saved; exit 0' INT; echo ready; while :; do sleep 0.05; done")
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stdout, c.Stderr = in, in
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	in.Close()
	late := time.AfterFunc(60*time.Second, func() { c.Process.Kill() })
	defer late.Stop()
	if _, err := out.Read(make([]byte, 100)); err != nil {
		t.Error(err)
	}
	out.Close()
	if err := c.Process.Signal(syscall.SIGINT); err != nil {
		t.Error(err)
	}
	if err := c.Wait(); c.ProcessState.ExitCode() != 130 {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(c.Dir, "saved")); err != nil {
		t.Error(err)
	}
}

func TestASignalWhileHostsAreDiscoveredEndsTheRun(t *testing.T) {
	c := command(t, "run", "--min-np", "1", "--host-discovery-script", "echo > ready; sleep 1000", "true")
	ready := fifo(t, c, "ready")
	run(t, c, func() {
		os.ReadFile(ready) // until the script has written to it
		c.Process.Signal(syscall.SIGINT)
	}).check(t, 130, "", "was broken off: signal 2")
}

func TestAJobOutlivesItsTerminalUnderNohup(t *testing.T) {
	c := command(t, "run", "sh", "-c", "echo > ready; until [ -e go ]; do sleep 0.05; done; echo done")
	c.Args = append([]string{"sh", "-c", `trap "" HUP; exec "$SELF" "$@"`, "sh"}, c.Args[1:]...)
	c.Path = "/bin/sh"
	ready := fifo(t, c, "ready")
	run(t, c, func() {
		os.ReadFile(ready) // until the rank has written to it
		c.Process.Signal(syscall.SIGHUP)
		time.Sleep(300 * time.Millisecond) // so that it would have ended the job
		os.WriteFile(filepath.Join(c.Dir, "go"), nil, 0o600)
	}).check(t, 0, "done", "")
}

func TestEveryWorkerReachesTheSchedulerWithTheJobsSecret(t *testing.T) {
	r := paceline(t, "run", "-np", "2", "sh", "-c", `PACELINE_TEST_COMMAND=1 exec "$SELF" status`)
	r.check(t, 0, "[1]<stdout>:scheduler 127.0.0.1:", "")
}

// What torchrun sets is set whatever the environment has, such as that of a torchrun around the job.
func TestWorkersOfTorchDistributedFindEachOther(t *testing.T) {
	const script = `echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID"`
	c := command(t, "run", "-np", "2", "sh", "-c", script)
	c.Env = append(c.Env, "RANK=7", "WORLD_SIZE=9", "MASTER_ADDR=elsewhere", "MASTER_PORT=1", "TORCHELASTIC_RUN_ID=outer")
	r := run(t, c)
	r.check(t, 0, "", "")
	_, port, _ := strings.Cut(r.stdout, "127.0.0.1:")
	port, _, _ = strings.Cut(port, " ")
	for rank := range 2 {
		if want := fmt.Sprintf("[%d]<stdout>:%d/2 %d/2 127.0.0.1:%s \n", rank, rank, rank, port); !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in %s", want, r.stdout)
		}
	}
	c = command(t, "run", "-H", "hostA:1,hostB:1", "--network-interfaces", "lo", "--remote-shell", "env -i PATH=/usr/bin:/bin {host}=", "--master-port", "29511", "sh", "-c", script)
	r = run(t, c)
	for rank := range 2 {
		if want := fmt.Sprintf("[%d]<stdout>:%d/2 0/1 hostA:29511 \n", rank, rank); r.code != 0 || !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in %+v", want, r)
		}
	}
}

func TestHorovodResolvesToPaceline(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("no python3")
	}
	root, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	c := command(t, "run", "-np", "1", "--horovod", "python3", "-c", "import horovod; print(horovod.__file__)")
	c.Env = append(c.Env, "PYTHONPATH="+root)
	run(t, c).check(t, 0, "[0]<stdout>:"+root+"/paceline/_horovod/horovod/__init__.py\n", "")

	c = command(t, "run", "--horovod", "python3", "-c", "")
	c.Env = append(c.Env, "PYTHONPATH=", "PATH=/usr/bin:/bin")
	if r := run(t, c); r.code == 0 || !strings.Contains(r.stderr, "--horovod needs Paceline's Python package") {
		t.Fatalf("%+v", r)
	}
}

func TestEnvLetsEveryLauncherFindHorovod(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("no python3")
	}
	root, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	c := command(t, "env", "--horovod")
	c.Env = append(c.Env, "PYTHONPATH="+root)
	said := run(t, c)
	said.check(t, 0, "export PYTHONPATH='"+root+"/paceline/_horovod'${PYTHONPATH:+:$PYTHONPATH}\n", "")
	for before, after := range map[string]string{"": "", "a:b": ":a:b"} {
		sh := exec.Command("sh", "-c", said.stdout+`printf %s "$PYTHONPATH"`)
		sh.Env = append(os.Environ(), "PYTHONPATH="+before)
		if out, err := sh.Output(); err != nil || string(out) != root+"/paceline/_horovod"+after {
			t.Errorf("PYTHONPATH %q becomes %q, %v", before, out, err)
		}
	}
	run(t, command(t, "env")).check(t, 1, "", "paceline env: say --horovod, for scripts that import horovod\n")
}

func TestSchedulerAnswersStatusUntilASignal(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	scheduler := command(t, "scheduler", "--listen", address)
	scheduler.Env = append(scheduler.Env, "PACELINE_JOB_SECRET=of this test alone")
	scheduler.Stderr = os.Stderr
	if err := scheduler.Start(); err != nil {
		t.Fatal(err)
	}
	ask := func(secret string, args ...string) result {
		c := command(t, append([]string{"status", "--scheduler", address, "--timeout", "20s"}, args...)...)
		c.Env = append(c.Env, "PACELINE_JOB_SECRET="+secret)
		return run(t, c)
	}
	r := ask("of this test alone")
	r.check(t, 0, "scheduler "+address+": forming", "")
	var status map[string]any
	if r := ask("of this test alone", "--json"); json.Unmarshal([]byte(r.stdout), &status) != nil || status["state"] != "forming" {
		t.Fatalf("%+v", r)
	}
	if r := ask("of some other test", "--timeout", "2s"); r.code == 0 || !strings.Contains(r.stderr, address) {
		t.Fatalf("%+v", r)
	}
	server := command(t, "server", "--scheduler", address)
	server.Env = append(server.Env, "PACELINE_JOB_SECRET=of this test alone", "PACELINE_LOG_LEVEL=info")
	log, err := server.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 4096)
	if n, err := log.Read(line); err != nil || !strings.Contains(string(line[:n]), "server listens") {
		t.Fatal(string(line[:n]), err)
	}
	for _, c := range []*exec.Cmd{server, scheduler} {
		c.Process.Signal(syscall.SIGTERM)
		if err := c.Wait(); err != nil {
			t.Fatal(c.Args, err)
		}
	}
}

func TestInfoTellsSettingsAndWhereTheyCameFrom(t *testing.T) {
	c := command(t, "info", "--json")
	c.Env = append(c.Env, "BYTEPS_PARTITION_BYTES=1MiB", "HOROVOD_CYCLE_TIME=3")
	r := run(t, c)
	r.check(t, 0, `"version": "`+version.String()+`"`, "")
	var f facts
	if err := json.Unmarshal([]byte(r.stdout), &f); err != nil || len(f.Interfaces) == 0 || len(f.Warnings) != 1 {
		t.Fatal(err, r.stdout)
	}
	c = command(t, "info")
	c.Env = append(c.Env, "PACELINE_SERVERS=nowhere")
	run(t, c).check(t, 0, `error: PACELINE_SERVERS="nowhere": allowed are embedded`, "")
}

func TestCheckBuildAndVersion(t *testing.T) {
	paceline(t, "run", "-cb").check(t, 0, "Paceline "+version.String()+":", "")
	paceline(t, "--version").check(t, 0, "paceline "+version.String()+"\n", "")
}
