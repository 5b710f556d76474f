package watch

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/paceline/paceline/core/tuning"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport/wire"
)

// Show writes jobs down: one in full, several as a list. In full are at most so many ranks, the last ones in the race; 0
// is for all.
func Show(out io.Writer, views []View, ranks int) {
	if len(views) == 1 {
		views[0].Show(out, ranks)
		return
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "job\tstate\tranks\titeration\tper s\tup\tcommand")
	for _, v := range views {
		if v.Error != "" {
			fmt.Fprintf(table, "%d\tno answer\t-\t-\t-\t%v\t%s\n", v.ID, v.up(), short(v.Command))
			continue
		}
		iteration, rate := "", ""
		if r := v.fastest(); r != nil {
			iteration, rate = fmt.Sprint(r.Iteration), fmt.Sprintf("%.3g", r.Rate)
		}
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\t%v\t%s\n", v.ID, v.State, v.size(), iteration, rate, v.up(), short(v.Command))
	}
	table.Flush()
}

// size is the number of ranks that an elastic job has not lost, of how many.
func (v *View) size() string {
	lost := 0
	for _, r := range v.Ranks {
		if r.State == wire.StateLost {
			lost++
		}
	}
	if lost == 0 {
		return fmt.Sprint(len(v.Ranks))
	}
	return fmt.Sprintf("%d of %d", len(v.Ranks)-lost, len(v.Ranks))
}

// line is a command in one line, without what would be for the terminal.
func line(command string) string {
	return strings.Join(strings.FieldsFunc(command, func(c rune) bool { return unicode.IsSpace(c) || !unicode.IsPrint(c) }), " ")
}

// short cuts a command for a list.
func short(command string) string {
	const most = 60
	command = line(command)
	if letters := []rune(command); len(letters) > most {
		return string(letters[:most]) + "..."
	}
	return command
}

// Show writes the job down in full.
func (v *View) Show(out io.Writer, ranks int) {
	if v.ID != 0 {
		fmt.Fprintf(out, "job %d: %s\n", v.ID, line(v.Command))
	}
	if v.Error != "" {
		fmt.Fprintf(out, "scheduler %s: %s\n", v.Scheduler, line(v.Error))
		return
	}
	fmt.Fprintf(out, "scheduler %s: %s, up %v, %d tensors\n", v.Scheduler, v.State, v.up(), v.Tensors)
	if v.Waiting != "" {
		fmt.Fprintf(out, "waiting for %s\n", line(v.Waiting))
	}
	if v.Roster == nil {
		return
	}
	v.showRanks(out, ranks)
	for i, n := range v.Roster.Servers {
		if n.Role == wire.RoleServer {
			fmt.Fprintf(out, "server %d on %s (pid %d) at %v%s\n", i, line(n.Host), n.PID, n.Addresses, v.stateOf(i))
		}
	}
	if r := v.slowest(); r != nil && r.Behind > oneStep {
		fmt.Fprintf(out, "slowest: rank %d on %s, %d behind\n", r.Rank, line(r.Host), r.Behind)
	}
	if text := v.tuning(); text != "" {
		fmt.Fprintln(out, text)
	}
	for _, w := range v.waits() {
		fmt.Fprintf(out, "%q has waited %.1f s for %s\n", w.Name, w.Seconds, rankset.Of(w.Missing...).Named())
	}
}

func (v *View) showRanks(out io.Writer, most int) {
	list := v.Ranks
	if most > 0 && len(list) > most {
		list = slices.Clone(list)
		slices.SortStableFunc(list, func(a, b Rank) int {
			return cmp.Or(-cmp.Compare(len(a.State), len(b.State)), -cmp.Compare(a.Behind, b.Behind))
		})
		list = list[:most]
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "rank\thost\tpid\titeration\tbehind\tper s\tmean\ttensors\tsent\t")
	for _, r := range list {
		if r.State != "" {
			fmt.Fprintf(table, "%d\t%s\t%d\t%s\t\t\t\t\t\t\n", r.Rank, line(r.Host), r.PID, r.State)
			continue
		}
		fmt.Fprintf(table, "%d\t%s\t%d\t%d\t%d\t%.3g\t%.3g\t%s\t%s\t\n", r.Rank, line(r.Host), r.PID, r.Iteration, r.Behind, r.Rate, r.Average, perSecond(r.Bytes), perSecond(r.Sent))
	}
	table.Flush()
	if more := len(v.Ranks) - len(list); more > 0 {
		fmt.Fprintf(out, "and %d more ranks\n", more)
	}
}

// Line is the job in one line, for a log.
func (v *View) Line() string {
	if v.Error != "" {
		return "the scheduler does not answer: " + v.Error
	}
	front := v.fastest()
	if front == nil {
		return strings.TrimSuffix(v.State+", waiting for "+v.Waiting, ", waiting for ")
	}
	sent := 0.0
	for _, r := range v.Ranks {
		sent += r.Sent
	}
	line := fmt.Sprintf("iteration %d, %.3g per second, %s sent", front.Iteration, front.Rate, perSecond(sent))
	if last := v.slowest(); last.Behind > oneStep {
		line += fmt.Sprintf("; slowest: rank %d, %d behind", last.Rank, last.Behind)
	}
	if i := slices.IndexFunc(v.Ranks, func(r Rank) bool { return r.State != "" }); i >= 0 { // it has not answered
		line += fmt.Sprintf("; rank %d: %s", v.Ranks[i].Rank, v.Ranks[i].State)
	}
	return line
}

// tuning says how far the search for better settings is, "" where none runs. All ranks search alike: one speaks for all.
func (v *View) tuning() string {
	for _, r := range v.Ranks {
		if r.progress == nil || r.progress.Tuning == nil {
			continue
		}
		switch t := r.progress.Tuning; t.Phase {
		case tuning.Ended:
			return fmt.Sprintf("autotuning has ended, %.2f times as fast as with the settings before:\n%s", t.Speedup, t.Settings)
		default:
			return fmt.Sprintf("autotuning tries %s; the best so far:\n%s", t.Phase, t.Settings)
		}
	}
	return ""
}

func (v *View) up() time.Duration {
	return time.Duration(v.Uptime * float64(time.Second)).Round(time.Second)
}

// Silence is the error of a job that has not answered, with what is known of it.
func (v *View) Silence() error {
	if v.Command == "" {
		return v.Err
	}
	return fmt.Errorf("job %d, which began %v ago (%s), does not answer: %w", v.ID, v.up(), short(v.Command), v.Err)
}

// stateOf is what is to be said of a dedicated server, by its index.
func (v *View) stateOf(server int) string {
	for _, n := range v.Nodes {
		if n.Role == wire.RoleServer && n.Rank == server && n.State != "" {
			return ": " + n.State
		}
	}
	return ""
}

// Differences of no interest: ranks are never at one place at the same time.
const (
	shortWait = 0.1 // seconds
	oneStep   = 1   // iterations
)

// waits are what has waited longest for ranks, on all servers.
func (v *View) waits() (all []wire.Stall) {
	for _, n := range v.Nodes {
		if n.Progress != nil {
			all = append(all, n.Progress.Waits...)
		}
	}
	all = slices.DeleteFunc(all, func(w wire.Stall) bool { return w.Seconds < shortWait })
	slices.SortStableFunc(all, func(a, b wire.Stall) int { return -cmp.Compare(a.Seconds, b.Seconds) })
	return all[:min(len(all), wire.MaxWaits)]
}

// perSecond writes a rate of bytes.
func perSecond(bytes float64) string { return size(bytes) + "/s" }

func size(bytes float64) string {
	for _, unit := range []struct {
		name string
		size float64
	}{{"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}} {
		if bytes >= unit.size {
			return fmt.Sprintf("%.3g %s", bytes/unit.size, unit.name)
		}
	}
	return fmt.Sprintf("%.3g B", bytes)
}
