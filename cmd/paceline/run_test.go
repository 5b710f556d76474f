package main

import (
	"cmp"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/paceline/paceline/cmd/paceline/launch"
)

func TestAScriptIsNoProgram(t *testing.T) {
	c := command(t, "run", "./x.py", "--epochs", "3")
	if err := os.WriteFile(filepath.Join(c.Dir, "x.py"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, c).check(t, 127, "", "x.py is no program; run it as python ./x.py --epochs 3")
}

// TestRunRefusesSettingsThatNoRankWouldTake in one line, before it starts any.
func TestRunRefusesSettingsThatNoRankWouldTake(t *testing.T) {
	for setting, want := range map[string]string{
		"PACELINE_SYNC=sps:3":             `unknown synchronisation model "sps:3", did you mean "ssp"? Known are: bsp, `,
		"PACELINE_SYNC=adaptiv:1,1":       `did you mean "adaptive"?`,
		"PACELINE_SYNC=ssp:x":             "ssp:S",
		"PACELINE_SYNC=drop-stragglers:3": "allowed is from 1 to 2",
		"PACELINE_COMPRESSION=int9":       `PACELINE_COMPRESSION: unknown codec "int9", did you mean "int4"? Known are: bf16, `,
		"PACELINE_COMPRESSION=fp61":       `did you mean "fp16"?`,
		"PACELINE_COMPRESSION=/no/rules":  "/no/rules",
		"PACELINE_COMPRESSION=[{}]":       "rule 1",
		"PACELINE_PLACEMENT=psdl:0.2":     `did you mean "psld"?`,
	} {
		c := command(t, "run", "-np", "2", "echo", "started")
		c.Env = append(c.Env, setting)
		name, _, _ := strings.Cut(setting, "=")
		if r := run(t, c); r.code != 1 || r.stdout != "" || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, name) || !strings.Contains(r.stderr, want) {
			t.Errorf("%s: %+v", setting, r)
		}
	}
	c := command(t, "run", "-H", "hostA:1,hostB:1", "--network-interfaces", "lo", "--remote-shell", "env -i PATH=/usr/bin:/bin {host}=", "echo", "started")
	c.Env = append(c.Env, "PACELINE_COMPRESSION=/on/those/hosts/alone")
	run(t, c).check(t, 0, "started", "")
}

// TestRunReportsAsJSONHowTheJobWent, with nothing of the ranks on standard output; beside a file all is as without it.
func TestRunReportsAsJSONHowTheJobWent(t *testing.T) {
	const fails = `echo out of $PACELINE_RANK; [ "$PACELINE_RANK" = 0 ] || exit 7`
	check := func(text []byte) {
		t.Helper()
		var r launch.Report
		if err := json.Unmarshal(text, &r); err != nil {
			t.Fatalf("%v: %q", err, text)
		}
		if r.Code != 7 || r.Ranks != 2 || r.Seconds <= 0 || r.Lost == nil || len(r.Lost) != 0 || len(r.Failed) != 1 || r.Error != "" || len(r.Command) != 3 {
			t.Fatalf("%+v", r)
		}
		if f := r.Failed[0]; f.Name != "rank 1" || f.Rank == nil || *f.Rank != 1 || f.Host != "localhost" || f.PID == 0 || f.Code != 7 || f.Why != "ended with exit code 7" {
			t.Fatalf("%+v", f)
		}
	}
	r := paceline(t, "run", "-np", "2", "--json", "sh", "-c", fails)
	r.check(t, 7, "", "[1]<stdout>:out of 1\n")
	check([]byte(r.stdout))
	c := command(t, "run", "-np", "2", "--json=report", "sh", "-c", fails)
	r = run(t, c)
	r.check(t, 7, "[1]<stdout>:out of 1\n", "paceline run: rank 1 on localhost")
	text, err := os.ReadFile(filepath.Join(c.Dir, "report"))
	if err != nil {
		t.Fatal(err)
	}
	check(text)
	if strings.Contains(r.stdout, "exit_code") || strings.Contains(r.stderr, "<stdout>") {
		t.Fatalf("%+v", r)
	}
	for args, want := range map[string]string{
		"--json no-such-command":    "", // the word is the command
		"--json report.json true":   `unexpected argument "report.json": to write the JSON to that file, give --json=report.json`,
		"--json -np 2 a/b.json":     "give --json=a/b.json",
		"--json=/no/dir/x true":     "paceline run: --json: open /no/dir/x",
		"--json --check-build":      "paceline info --json has the build",
		"--json --hosts a;b true":   "is not the name of a host",
		"--json --listen none true": `--listen "none": allowed is host:port`,
	} {
		r := paceline(t, append([]string{"run"}, strings.Fields(args)...)...)
		if r.code == 0 || !strings.Contains(r.stderr, want) || (r.stdout == "") != (want != "") {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

// TestAnInterruptedRunReportsTheSignal, for no process has failed.
func TestAnInterruptedRunReportsTheSignal(t *testing.T) {
	c := command(t, "run", "-np", "1", "--json", "sh", "-c", "trap 'exit 0' INT; echo > ready; while :; do sleep 0.05; done")
	ready := fifo(t, c, "ready")
	r := run(t, c, func() {
		os.ReadFile(ready) // until the rank has written to it
		c.Process.Signal(syscall.SIGINT)
	})
	var report launch.Report
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || report.Code != 130 || r.code != 130 || report.Error != "signal 2 (interrupt)" || len(report.Failed) != 0 {
		t.Fatalf("%+v: %+v, %v", r, report, err)
	}
}

// TestRanksThatWaitHearOfOneThatDisagrees at once, and which rank and setting it is; but not of a process without the job's secret. Rank 1 begins when
// rank 0 waits for it.
func TestRanksThatWaitHearOfOneThatDisagrees(t *testing.T) {
	const (
		rank   = `export PACELINE_TEST_COMMAND=1; join() { "$SELF" bench allreduce --sizes 4KiB --duration 1ms --idle 0s; }; `
		first  = `[ "$PACELINE_RANK" = 1 ] || { join; exit; }; `
		waits  = `until "$SELF" status --timeout 20s 2>&1 | grep -q "waiting for rank 1 of 2"; do sleep 0.05; done; `
		wrong  = `PACELINE_SEED=5 join`
		forged = `PACELINE_JOB_SECRET=another-of-16-bytes PACELINE_SEED=5 join; `
	)
	r := paceline(t, "run", "-np", "2", "sh", "-c", rank+first+waits+wrong)
	r.check(t, 1, "", `[1]<stderr>:paceline bench allreduce: rank 1 cannot join the job: register: PACELINE_SEED has to be the same everywhere: it is "0" on rank 0 (`)
	r.check(t, 1, "", "[0]<stderr>:paceline bench allreduce: rank 0 cannot join the job: register: the job cannot start, because rank 1 (host localhost, pid ")
	r = paceline(t, "run", "-np", "2", "sh", "-c", rank+first+waits+forged+"join")
	r.check(t, 0, "", "authentication failed")
	if strings.Contains(r.stderr, "PACELINE_SEED") || strings.Contains(r.stderr, "[0]") {
		t.Fatalf("%+v", r)
	}
}

// TestProcessesOfAHostShareItsCores gives this host six cores, and the others eight.
func TestProcessesOfAHostShareItsCores(t *testing.T) {
	bin := t.TempDir()
	if err := os.WriteFile(bin+"/nproc", []byte("#!/bin/sh\necho ${OMP_NUM_THREADS:-8}\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	names := []string{"OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"}
	there := "env -u " + strings.Join(names, " -u ") + " ON={host}"
	for _, c := range []struct{ args, env, want string }{
		{"-np 1", "", "here all all all"},
		{"-np 2", "", "here 3 3 3"},
		{"-np 4", "", "here 1 1 1"},
		{"-np 8", "", "here 1 1 1"},
		{"-np 2", "OMP_NUM_THREADS=5", "here 5 3 3"},
		{"--min-np 2 --max-np 3", "", "here 2 2 2"},
		{"-H there:1", "", "there all all all"},
		{"-H localhost:1,there:3", "", "here all all all,there 2 2 2"},
		{"-H there:9", "", "there 1 1 1"},
		{"-H there:2", "OMP_NUM_THREADS=5", "there 5 4 4"},
		{"-H there:2", "NPROC=5", "there 4 4 5"},
	} {
		args := append([]string{"run", "--network-interfaces", "lo", "--remote-shell", there}, strings.Fields(c.args)...)
		cmd := command(t, append(args, "sh", "-c", "echo ${ON-here} ${OMP_NUM_THREADS-all} ${TF_NUM_INTRAOP_THREADS-all} ${NPROC-all}")...)
		cmd.Env = slices.DeleteFunc(cmd.Env, func(v string) bool {
			name, _, _ := strings.Cut(v, "=")
			return slices.Contains(names, name)
		})
		cmd.Env = append(cmd.Env, "GOMAXPROCS=6", "PATH="+bin+":"+os.Getenv("PATH"), cmp.Or(c.env, "NOTHING="))
		r := run(t, cmd)
		var lines []string
		for line := range strings.Lines(r.stdout) {
			_, said, _ := strings.Cut(strings.TrimSpace(line), "<stdout>:")
			lines = append(lines, said)
		}
		slices.Sort(lines)
		if got := strings.Join(slices.Compact(lines), ","); r.code != 0 || got != c.want {
			t.Errorf("paceline run %s, %s: exit code %d, %q instead of %q\n%s", c.args, c.env, r.code, got, c.want, r.stderr)
		}
	}
}
