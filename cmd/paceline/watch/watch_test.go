package watch

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/runfile"
	"github.com/paceline/paceline/transport/wire"
)

// view is a job of three ranks, seconds after its start; the last rank is 5 iterations behind.
func view(seconds float64, iteration uint64) View {
	v := View{ID: 7, Command: "train", Scheduler: "h:1", StatusReply: wire.StatusReply{State: "running", Tensors: 2, Uptime: seconds, Roster: &wire.Roster{}}}
	for rank := range 3 {
		v.Roster.Workers = append(v.Roster.Workers, wire.Node{Role: wire.RoleWorker, Rank: rank, Host: "host", PID: 10 + rank})
		p := wire.Progress{Seconds: seconds, Iteration: iteration, Bytes: iteration * 2e6, Sent: iteration * 1e6}
		if rank == 2 {
			p.Iteration -= 5
			p.Waits = []wire.Stall{{Name: "fc", Missing: []int{2}, Seconds: 3}, {Name: "conv", Missing: []int{2}, Seconds: 0.01}}
		}
		v.Nodes = append(v.Nodes, wire.NodeStatus{Role: wire.RoleWorker, Rank: rank, Progress: &p})
	}
	v.Ranks = ranksOf(v.StatusReply)
	return v
}

func text(v View, ranks int) string {
	var s strings.Builder
	v.Show(&s, ranks)
	return s.String()
}

func TestAJobInFull(t *testing.T) {
	v := Since([]View{view(10, 100)}, []View{view(12, 120)})[0]
	want := `job 7: train
scheduler h:1: running, up 12s, 2 tensors
  rank  host  pid  iteration  behind  per s  mean  tensors     sent
     0  host   10        120       0     10    10  20 MB/s  10 MB/s
     1  host   11        120       0     10    10  20 MB/s  10 MB/s
     2  host   12        115       5     10  9.58  20 MB/s  10 MB/s
slowest: rank 2 on host, 5 behind
"fc" has waited 3.0 s for rank 2
`
	if got := text(v, 0); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if got := v.Line(); got != "iteration 120, 10 per second, 30 MB/s sent; slowest: rank 2, 5 behind" {
		t.Error(got)
	}
}

// TestACountOfAnotherTensorIsNoRate, nor is one rank's behind another's: after a large broadcast gradients overtake it on one rank and then on the next.
func TestACountOfAnotherTensorIsNoRate(t *testing.T) {
	before, now := view(10, 1), view(12, 101)
	for i := range now.Nodes {
		p := now.Nodes[i].Progress
		if p.Tensor = "weight"; i == 1 {
			p.Tensor, p.Iteration = "", 1
		}
	}
	now.Ranks = ranksOf(now.StatusReply)
	v := Since([]View{before}, []View{now})[0]
	if got := v.Ranks[0].Rate; got != 101./12 {
		t.Errorf("rank 0 has a rate of %v, want its mean", got)
	}
	if v.Ranks[1].Behind != 0 || v.Ranks[2].Behind != 5 {
		t.Errorf("behind: %d and %d, want 0 and 5", v.Ranks[1].Behind, v.Ranks[2].Behind)
	}
}

// TestAJobThatCannotBeAskedDoesNotHideOthers: its file has an environment that is refused.
func TestAJobThatCannotBeAskedDoesNotHideOthers(t *testing.T) {
	jobs := []runfile.Job{{ID: 1, Env: map[string]string{"PACELINE_JOB_SECRET": "short"}}, {ID: 2, Env: map[string]string{"PACELINE_SCHEDULER": "127.0.0.1:1", "PACELINE_JOB_SECRET": "a secret for this test only"}}}
	targets := Here(jobs)
	if targets[0].Err == nil || targets[1].Err != nil {
		t.Error(targets[0].Err, targets[1].Err)
	}
	if v := targets[0].look(t.Context(), time.Second); v.ID != 1 || !strings.Contains(v.Error, "PACELINE_JOB_SECRET") {
		t.Error(v.Error)
	}
	if targets[1].Settings.Scheduler != "127.0.0.1:1" {
		t.Error(targets[1].Settings.Scheduler)
	}
}

// TestAListCountsTheRanksThatAJobHasLost, and not those that only do not answer.
func TestAListCountsTheRanksThatAJobHasLost(t *testing.T) {
	v := view(10, 100)
	v.Nodes[0].Progress, v.Nodes[0].State = nil, "no answer"
	v.Nodes[1].Progress, v.Nodes[1].State = nil, wire.StateLost
	v.Ranks = ranksOf(v.StatusReply)
	var s strings.Builder
	if Show(&s, []View{v, view(10, 100)}, 0); !strings.Contains(s.String(), "7    running  2 of 3  ") || !strings.Contains(s.String(), "7    running  3       ") {
		t.Error(s.String())
	}
}

// TestACommandOfSeveralLinesIsShownInOne: what python -c is given, and no escape sequence of it.
func TestACommandOfSeveralLinesIsShownInOne(t *testing.T) {
	v := view(10, 100)
	v.Command = "python -c \nimport torch\n\tprint(\x1b[2J)\n"
	for _, views := range [][]View{{v}, {v, v}} {
		var s strings.Builder
		if Show(&s, views, 0); !strings.Contains(s.String(), "python -c import torch print( [2J)\n") {
			t.Error(s.String())
		}
	}
}

// TestASearchIsShownWithItsSettings, which can be copied.
func TestASearchIsShownWithItsSettings(t *testing.T) {
	v := view(10, 100)
	for phase, want := range map[string]string{
		"credit": "autotuning tries credit; the best so far:\nA=1 B=2\n",
		"end":    "autotuning has ended, 1.25 times as fast as with the settings before:\nA=1 B=2\n",
	} {
		v.Nodes[0].Progress.Tuning = &wire.Tuning{Phase: phase, Settings: "A=1 B=2", Speedup: 1.25}
		v.Ranks = ranksOf(v.StatusReply)
		if got := text(v, 0); !strings.Contains(got, want) {
			t.Error(got)
		}
	}
}

// TestRanksOfInterestComeFirstWhereThereIsNoRoom: those that do not answer, then those that are behind.
func TestRanksOfInterestComeFirstWhereThereIsNoRoom(t *testing.T) {
	v := view(10, 100)
	v.Nodes[1].Progress, v.Nodes[1].State = nil, "no answer"
	v.Ranks = ranksOf(v.StatusReply)
	got := text(v, 2)
	if silent, behind := strings.Index(got, "no answer"), strings.Index(got, "95"); silent < 0 || behind < silent || !strings.Contains(got, "and 1 more ranks\n") {
		t.Error(got)
	}
	if line := v.Line(); !strings.HasSuffix(line, "; rank 1: no answer") {
		t.Error(line)
	}
}

// TestTheFirstLookHasRatesSinceTheStart, and so has another round, whose counts begin again.
func TestTheFirstLookHasRatesSinceTheStart(t *testing.T) {
	first := view(10, 100)
	if got := first.Line(); !strings.HasPrefix(got, "iteration 100, 10 per second, 30 MB/s sent") {
		t.Error(got)
	}
	v := Since([]View{first}, []View{view(3, 6)})[0]
	if v.Ranks[0].Rate != 2 {
		t.Error(v.Ranks[0])
	}
}

func TestAJobThatCannotTellMuch(t *testing.T) {
	forming := View{Scheduler: "h:1", StatusReply: wire.StatusReply{State: "forming", Waiting: "rank 1 of 2"}}
	if got := text(forming, 0); got != "scheduler h:1: forming, up 0s, 0 tensors\nwaiting for rank 1 of 2\n" {
		t.Error(got)
	}
	if got := forming.Line(); got != "forming, waiting for rank 1 of 2" {
		t.Error(got)
	}
	dead := View{ID: 3, Scheduler: "h:1", Error: "refused", Err: errors.New("refused"), StatusReply: wire.StatusReply{Uptime: 61}}
	if got := text(dead, 0); got != "job 3: \nscheduler h:1: refused\n" {
		t.Error(got)
	}
	var list strings.Builder
	Show(&list, []View{forming, dead, view(10, 100)}, 0)
	for _, want := range []string{"forming", "no answer  -      -          -      1m1s", "running    3      100"} {
		if !strings.Contains(list.String(), want) {
			t.Errorf("no %q in\n%s", want, list.String())
		}
	}
}

// TestAJobThatHasEndedHasNoView though its file was there when jobs were listed; one that does not answer has one.
func TestAJobThatHasEndedHasNoView(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv("TMPDIR", t.TempDir())
	file, err := runfile.Publish(runfile.Job{Scheduler: "127.0.0.1:1", Env: map[string]string{"PACELINE_SCHEDULER": "127.0.0.1:1", "PACELINE_JOB_SECRET": "of this test alone"}})
	if err != nil {
		t.Fatal(err)
	}
	jobs, err := runfile.List()
	if err != nil {
		t.Fatal(err)
	}
	targets := Here(jobs)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if views := Look(ended, targets, time.Minute); len(views) != 1 || views[0].Err == nil {
		t.Error(views)
	}
	file.Remove()
	if views := Look(ended, targets, time.Minute); len(views) != 0 {
		t.Error(views)
	}
}

// TestTheServersOfAJob with what each has and does: one in a worker, one that has its own process, and those that have gone.
func TestTheServersOfAJob(t *testing.T) {
	look := func(seconds float64, served uint64) *wire.StatusReply {
		at := func(role wire.Role, rank int, host string) wire.Node {
			return wire.Node{Role: role, Rank: rank, Host: host, PID: 10 + rank, Version: "1.2", Addresses: address.List{{Kind: "tcp", At: host + ":1"}}}
		}
		worker, drained, lost, serves := at(wire.RoleWorker, 0, "a"), at(wire.RoleServer, 1, "b"), at(wire.RoleServer, 2, "c"), at(wire.RoleServer, 3, "d")
		return &wire.StatusReply{
			State: "running", Shares: []wire.Share{{Keys: 2, Bytes: 3e6}, {}, {}, {Keys: 1, Bytes: 999}},
			Roster: &wire.Roster{
				Workers: []wire.Node{worker}, Servers: []wire.Node{worker, drained, lost, serves},
				Gone: []wire.Lost{{Role: wire.RoleServer, Rank: 1, Drained: true}, {Role: wire.RoleServer, Rank: 2}},
			},
			Profiles: []wire.ServerProfile{{}, {}, {}, {Workers: 2, Speed: 118e6, Seconds: 0.0351, Error: 0.0004}},
			Nodes: []wire.NodeStatus{
				{Role: wire.RoleWorker, Rank: 0, State: "no answer"}, {Role: wire.RoleServer, Rank: 1, State: "lost"}, {Role: wire.RoleServer, Rank: 2, State: "lost"},
				{Role: wire.RoleServer, Rank: 3, Progress: &wire.Progress{Seconds: seconds, Served: served}},
			},
		}
	}
	servers, err := Servers(look(10, 1000), look(12, 5000))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	ShowServers(&out, servers, &wire.StatusReply{Verdict: &wire.Verdict{Placement: "psld:0", Remap: true, Ratio: 9.81}, Nodes: []wire.NodeStatus{
		{Progress: &wire.Progress{Suspension: &wire.Suspension{Epoch: 2, Last: 0.0123, Worst: 0.0456}}}, {},
		{Progress: &wire.Progress{Suspension: &wire.Suspension{Epoch: 1, Last: 0.5, Worst: 0.05}}},
	}})
	want := `server  process    host  pid  version  keys  bytes  load       speed     exchange       at
0       worker 0   a     10   1.2      2     3 MB   no answer  -         -              tcp a:1
1       dedicated  b     11   1.2      0     0 B    drained    -         -              tcp b:1
2       dedicated  c     12   1.2      0     0 B    lost       -         -              tcp c:1
3       dedicated  d     13   1.2      1     999 B  2 kB/s     118 MB/s  35.1 ± 0.4 ms  tcp d:1

the placement psld:0 asks for: to move keys to faster servers; the fastest server is 9.81 times as fast as the slowest

changes of servers have suspended workers for up to 12.3 ms in epoch 2, 50 ms at most
`
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
	if again, _ := Servers(look(12, 5000), look(1, 10)); again[3].Load != 0 { // another process answers
		t.Errorf("%+v", again[3])
	}
	now := look(1, 1)
	now.Shares = nil
	if _, err := Servers(now, now); err == nil || !strings.Contains(err.Error(), "ask again") {
		t.Error(err)
	}
	if _, err := Servers(now, &wire.StatusReply{Waiting: "rank 1 of 2"}); err == nil || err.Error() != "the job has no servers yet: it waits for rank 1 of 2" {
		t.Error(err)
	}
}
