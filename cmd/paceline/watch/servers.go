package watch

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/transport/wire"
)

// Server is one server of a job at one time, as it is shown and as JSON.
type Server struct {
	Index     int          `json:"index"`
	Worker    *int         `json:"worker,omitempty"` // rank of the worker that it is in; nil for a dedicated server
	Host      string       `json:"host"`
	PID       int          `json:"pid"`
	Version   string       `json:"version"`
	Addresses address.List `json:"addresses"`
	State     string       `json:"state,omitempty"` // "" for one that has answered; else "no answer", "absent", "left", "lost" or "drained"
	wire.Share
	Load    float64             `json:"load_bytes_per_second"` // that come to it
	Profile *wire.ServerProfile `json:"profile,omitempty"`     // nil where no worker has measured it
}

// Servers lists the servers of a job, from two looks at it.
func Servers(before, now *wire.StatusReply) ([]Server, error) {
	if now.Roster == nil {
		return nil, fmt.Errorf("the job has no servers yet: it waits for %s", now.Waiting)
	}
	if len(now.Shares) != len(now.Roster.Servers) {
		return nil, errors.New("the job changes at present: ask again")
	}
	var all []Server
	for i, n := range now.Roster.Servers {
		s := Server{Index: i, Host: n.Host, PID: n.PID, Version: n.Version, Addresses: n.Addresses, Share: now.Shares[i]}
		if i < len(now.Profiles) && now.Profiles[i].Workers > 0 {
			s.Profile = &now.Profiles[i]
		}
		role, number := n.Role, i
		if role == wire.RoleWorker {
			s.Worker, number = &n.Rank, n.Rank
		}
		node := nodeOf(now, role, number)
		s.State = node.State
		for _, gone := range now.Roster.Gone {
			if gone.Role == role && gone.Rank == number && gone.Drained {
				s.State = "drained"
			}
		}
		if p, then := node.Progress, nodeOf(before, role, number).Progress; p != nil && then != nil && p.Seconds > then.Seconds && p.Served >= then.Served {
			s.Load = float64(p.Served-then.Served) / (p.Seconds - then.Seconds)
		}
		all = append(all, s)
	}
	return all, nil
}

func nodeOf(s *wire.StatusReply, role wire.Role, number int) wire.NodeStatus {
	for _, n := range s.Nodes {
		if n.Role == role && n.Rank == number {
			return n
		}
	}
	return wire.NodeStatus{}
}

// ShowServers writes them down, with what the placement asks for and for how long changes of servers have suspended workers.
func ShowServers(out io.Writer, servers []Server, s *wire.StatusReply) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "server\tprocess\thost\tpid\tversion\tkeys\tbytes\tload\tspeed\texchange\tat")
	for _, s := range servers {
		process, load := "dedicated", s.State
		if s.Worker != nil {
			process = fmt.Sprint("worker ", *s.Worker)
		}
		if load == "" {
			load = perSecond(s.Load)
		}
		speed, exchange := "-", "-"
		if p := s.Profile; p != nil {
			speed, exchange = perSecond(p.Speed), fmt.Sprintf("%.3g ± %.2g ms", 1e3*p.Seconds, 1e3*p.Error)
		}
		fmt.Fprintf(table, "%d\t%s\t%s\t%d\t%s\t%d\t%s\t%s\t%s\t%s\t%v\n", s.Index, process, line(s.Host), s.PID, line(s.Version), s.Keys, size(float64(s.Bytes)), load, speed, exchange, s.Addresses)
	}
	table.Flush()
	for _, text := range []string{asks(s.Verdict), suspensions(s.Nodes)} {
		if text != "" {
			fmt.Fprintf(out, "\n%s\n", text)
		}
	}
}

// suspensions is in words for how long changes of servers have suspended the worker that waited longest, "" for none.
func suspensions(nodes []wire.NodeStatus) string {
	var longest wire.Suspension
	for _, n := range nodes {
		if n.Progress == nil || n.Progress.Suspension == nil {
			continue
		}
		s := n.Progress.Suspension
		if s.Epoch > longest.Epoch {
			longest.Epoch, longest.Last = s.Epoch, 0
		}
		if s.Epoch == longest.Epoch {
			longest.Last = max(longest.Last, s.Last)
		}
		longest.Worst = max(longest.Worst, s.Worst)
	}
	if longest.Worst == 0 {
		return ""
	}
	return fmt.Sprintf("changes of servers have suspended workers for up to %.3g ms in epoch %d, %.3g ms at most", 1e3*longest.Last, longest.Epoch, 1e3*longest.Worst)
}

// asks is a verdict in words, "" for none.
func asks(v *wire.Verdict) string {
	if v == nil {
		return ""
	}
	text := "no change"
	switch {
	case v.Remap && v.Grow:
		text = "to move keys to faster servers, and one more server"
	case v.Remap:
		text = "to move keys to faster servers"
	case v.Grow:
		text = "one more server"
	}
	return fmt.Sprintf("the placement %s asks for: %s; the fastest server is %.3g times as fast as the slowest", v.Placement, text, v.Ratio)
}
