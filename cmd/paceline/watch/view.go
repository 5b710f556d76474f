package watch

import (
	"time"

	"github.com/paceline/paceline/transport/wire"
)

// View is one job at one time, as it is shown and as JSON.
type View struct {
	ID        int        `json:"id,omitempty"` // of a job on this machine
	Started   *time.Time `json:"started,omitempty"`
	Command   string     `json:"command,omitempty"`
	Directory string     `json:"directory,omitempty"`
	Scheduler string     `json:"scheduler"`
	Error     string     `json:"error,omitempty"` // why the scheduler has not answered
	Err       error      `json:"-"`
	over      bool       // it has not answered because it has ended

	wire.StatusReply
	Ranks []Rank `json:"ranks,omitempty"`
}

// Rank is how far one worker is. Rates are per second.
type Rank struct {
	Rank      int     `json:"rank"`
	Host      string  `json:"host"`
	PID       int     `json:"pid"`
	State     string  `json:"state,omitempty"` // "" for a worker that has answered
	Iteration uint64  `json:"iteration"`
	Behind    uint64  `json:"behind"` // iterations behind the furthest rank that counts the same tensor
	Rate      float64 `json:"iterations_per_second"`
	Average   float64 `json:"average_iterations_per_second"` // since the worker joined
	Bytes     float64 `json:"bytes_per_second"`              // of the tensors of operations that have ended
	Sent      float64 `json:"sent_bytes_per_second"`         // as encoded, to servers in other processes

	progress *wire.Progress
}

// ranksOf lists the workers of a status, with rates since they joined.
func ranksOf(s wire.StatusReply) (ranks []Rank) {
	if s.Roster == nil {
		return nil
	}
	furthest := map[string]uint64{} // by the tensor that is counted
	for _, n := range s.Nodes {
		if n.Role != wire.RoleWorker || n.Rank < 0 || n.Rank >= len(s.Roster.Workers) {
			continue
		}
		at := &s.Roster.Workers[n.Rank]
		r := Rank{Rank: n.Rank, Host: at.Host, PID: at.PID, State: n.State, progress: n.Progress}
		if p := n.Progress; p != nil {
			r.Iteration = p.Iteration
			furthest[p.Tensor] = max(furthest[p.Tensor], p.Iteration)
			if p.Seconds > 0 {
				r.Average = float64(p.Iteration) / p.Seconds
				r.Rate = r.Average
				r.Bytes, r.Sent = float64(p.Bytes)/p.Seconds, float64(p.Sent)/p.Seconds
			}
		}
		ranks = append(ranks, r)
	}
	for i := range ranks {
		if ranks[i].progress != nil {
			ranks[i].Behind = furthest[ranks[i].progress.Tensor] - ranks[i].Iteration
		}
	}
	return ranks
}

// rates are measured since a view before of the same job, by the workers' own clocks.
func (v *View) rates(before *View) {
	for i := range v.Ranks {
		r := &v.Ranks[i]
		if i >= len(before.Ranks) || r.progress == nil || before.Ranks[i].progress == nil {
			continue
		}
		now, then := r.progress, before.Ranks[i].progress
		seconds := now.Seconds - then.Seconds
		if seconds <= 0 || now.Tensor != then.Tensor || now.Iteration < then.Iteration || now.Bytes < then.Bytes || now.Sent < then.Sent { // another round
			continue
		}
		r.Rate = float64(now.Iteration-then.Iteration) / seconds
		r.Bytes, r.Sent = float64(now.Bytes-then.Bytes)/seconds, float64(now.Sent-then.Sent)/seconds
	}
}

// slowest is the rank that is furthest behind, nil where none has answered.
func (v *View) slowest() *Rank {
	var last *Rank
	for i := range v.Ranks {
		if r := &v.Ranks[i]; r.progress != nil && (last == nil || r.Behind > last.Behind) {
			last = r
		}
	}
	return last
}

// fastest is the rank that is in front, nil where none has answered.
func (v *View) fastest() *Rank {
	for i := range v.Ranks {
		if r := &v.Ranks[i]; r.progress != nil && r.Behind == 0 {
			return r
		}
	}
	return nil
}
