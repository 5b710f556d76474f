// Package bench has the four measurements of `paceline bench`. Each has a plan, a measurement and a report:
//
//   - allreduce*.go: sums of tensors, measured by one rank of a job (Paceline alone; the repository's bench/ compares it
//     with Gloo);
//   - codec*.go: the kernels of codecs on one core, and their effect on gradients;
//   - barrier.go: the search for ElasticBSP's next barrier;
//   - scale.go: one server with many workers.
//
// A repetition of allreduce: every rank fills its tensors with known values, waits at a barrier, then exchanges its
// tensors one after the other, in place, and checks every element of every result.
// The clock runs from the barrier to the last result; a repetition took as long as its slowest rank,
// divided by the number of tensors. The sizes alternate, so that other load on the machine affects
// all of them.
package bench

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/node/settings"
)

// AllreducePlan describes a measurement.
type AllreducePlan struct {
	Sizes    []int64 // bytes of a tensor
	DType    units.DType
	Duration time.Duration // for each size, with filling and checking
	Idle     time.Duration // duration of the idle measurement; 0: none
}

// AllreduceRow is the result of one size.
type AllreduceRow struct {
	Bytes       int64   `json:"bytes"`
	InARow      int     `json:"in_a_row"` // exchanges in one repetition
	Repetitions int     `json:"repetitions"`
	Median      float64 `json:"median_ms"` // of one exchange, on the slowest rank
	P10         float64 `json:"p10_ms"`
	P90         float64 `json:"p90_ms"`
	GBps        float64 `json:"gb_per_s"` // tensor bytes over the median, 1e9 to the GB
}

// Idle is the CPU time of the workers' processes while the job was idle.
type Idle struct {
	Seconds    float64 `json:"seconds"`
	CPUSeconds float64 `json:"cpu_seconds"` // user and system, of all ranks together
}

// AllreduceResult is the result of one job.
type AllreduceResult struct {
	Ranks          int            `json:"ranks"`
	Servers        string         `json:"servers"` // embedded, dedicated or both
	NumServers     int            `json:"num_servers"`
	DType          string         `json:"dtype"`
	PartitionBytes int64          `json:"partition_bytes"`
	CreditBytes    int64          `json:"credit_bytes"`
	Connections    int            `json:"connections"`
	Rows           []AllreduceRow `json:"rows"`
	Idle           *Idle          `json:"idle,omitempty"`
}

// AllreduceReport is the file that --json writes.
type AllreduceReport struct {
	Head
	Results []AllreduceResult `json:"results"`
}

// Head begins every report: what was measured, when, by which release and where.
type Head struct {
	Benchmark string `json:"benchmark"`
	Version   string `json:"version"`
	Time      string `json:"time"` // RFC 3339
	Cores     int    `json:"cores"`
}

// NewHead is the head of a report that is made now.
func NewHead(benchmark string) Head {
	return Head{benchmark, version.String(), time.Now().Format(time.RFC3339), runtime.NumCPU()}
}

// newRow summarises the seconds of the repetitions on their slowest ranks.
func newRow(bytes int64, seconds []float64) AllreduceRow {
	ms := slices.Clone(seconds)
	for i := range ms {
		ms[i] *= 1e3 / float64(inARow(bytes))
	}
	slices.Sort(ms)
	r := AllreduceRow{
		Bytes: bytes, InARow: inARow(bytes), Repetitions: len(ms),
		Median: quantile(ms, 0.5), P10: quantile(ms, 0.1), P90: quantile(ms, 0.9),
	}
	r.GBps = float64(bytes) / r.Median / 1e6
	return r
}

// quantile interpolates between neighbours in sorted values.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	low, part := math.Modf(at)
	i := int(low)
	return sorted[i] + part*(sorted[min(i+1, len(sorted)-1)]-sorted[i])
}

// inARow is the number of exchanges in one repetition: small ones are too short to time alone.
func inARow(bytes int64) int { return int(min(max(4<<20/max(bytes, 1), 1), 16)) }

// Show prints the result as a table.
func (r *AllreduceResult) Show(out io.Writer) {
	servers := r.Servers
	if r.NumServers > 0 {
		servers = fmt.Sprintf("%s (%d)", servers, r.NumServers)
	}
	fmt.Fprintf(out, "%d ranks, %s, servers %s\n", r.Ranks, r.DType, servers)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "bytes\tmedian ms\tp10\tp90\tGB/s\trepetitions\t\n")
	for _, row := range r.Rows {
		fmt.Fprintf(table, "%s\t%.3f\t%.3f\t%.3f\t%.3f\t%d x %d\t\n", settings.ShowSize(row.Bytes), row.Median, row.P10, row.P90, row.GBps, row.Repetitions, row.InARow)
	}
	_ = table.Flush() // as with Fprintf: there is no one to report to
	if r.Idle != nil {
		fmt.Fprintf(out, "idle for %.1f s: %.3f s of CPU, all ranks together\n", r.Idle.Seconds, r.Idle.CPUSeconds)
	}
}
