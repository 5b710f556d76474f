package scheduler

import (
	"fmt"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/transport/wire"
)

// A scheduler that was stopped does not take a node for lost whose message of the time lies unread: a deadline that has passed meanwhile is put off.
func TestNoDeadlinePassesWhileTheProcessDoesNotRun(t *testing.T) {
	m := NewMachine(Settings{Grace: 3 * time.Second})
	c := clock{patience: time.Second}
	at := func(process time.Duration, in Input) []Output {
		in.Now = c.now(process, m)
		return m.Step(in)
	}
	register := func(line Line, session uint64, rank int) Input {
		return Input{Line: line, Message: &wire.Control{ID: 1, Wait: 60, Register: &wire.Register{Node: wire.Node{Role: wire.RoleWorker, Rank: rank, Session: session, Addresses: address.List{{Kind: "twin", At: fmt.Sprint("w", rank)}}}, Workers: 2}}}
	}
	lost := func(out []Output) bool {
		for _, o := range out {
			if o.Message != nil && o.Message.Lost != nil {
				return true
			}
		}
		return false
	}
	for rank := range 2 {
		line := Line(rank + 1)
		at(0, Input{Line: line, Hello: &wire.Hello{Role: wire.RoleWorker}})
		at(0, register(line, uint64(rank+1), rank))
	}
	at(time.Second, Input{Line: 2, Closed: "reset"})
	if lost(at(3*time.Second, Input{})) {
		t.Fatal("a node is lost within the grace time")
	}
	if out := at(time.Hour, Input{}); lost(out) {
		t.Error("a node is lost for the time in which the scheduler did not run")
	}
	if out := at(time.Hour+900*time.Millisecond, Input{}); lost(out) {
		t.Error("a node is lost before what it has said meanwhile can have been read")
	}
	if out := at(time.Hour+1100*time.Millisecond, Input{}); !lost(out) {
		t.Error("a node that stays away is never lost")
	}
}
