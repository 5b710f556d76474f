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
	Load float64 `json:"load_bytes_per_second"` // that come to it
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

// ShowServers writes them down.
func ShowServers(out io.Writer, servers []Server) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "server\tprocess\thost\tpid\tversion\tkeys\tbytes\tload\tat")
	for _, s := range servers {
		process, load := "dedicated", s.State
		if s.Worker != nil {
			process = fmt.Sprint("worker ", *s.Worker)
		}
		if load == "" {
			load = perSecond(s.Load)
		}
		fmt.Fprintf(table, "%d\t%s\t%s\t%d\t%s\t%d\t%s\t%s\t%v\n", s.Index, process, s.Host, s.PID, s.Version, s.Keys, size(float64(s.Bytes)), load, s.Addresses)
	}
	table.Flush()
}
