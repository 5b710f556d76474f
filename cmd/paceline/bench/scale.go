package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// ScalePlan describes a measurement of one server with many workers.
type ScalePlan struct {
	Sizes    []int64       // bytes of a tensor
	Tensors  []int         // of one exchange
	Duration time.Duration // for each pair of these, with filling and checking
}

// ScaleRow is the result of one pair. A message is a tensor's push and its answer.
type ScaleRow struct {
	Bytes       int64   `json:"bytes"`
	Tensors     int     `json:"tensors"`
	Repetitions int     `json:"repetitions"`
	Median      float64 `json:"median_ms"` // of an exchange, until the last worker has its last tensor
	P10         float64 `json:"p10_ms"`
	P90         float64 `json:"p90_ms"`
	PerSecond   float64 `json:"messages_per_s"`
	MBps        float64 `json:"mb_per_s"`          // that the server receives, and that it sends, 1e6 to the MB
	ServerCPU   float64 `json:"server_message_us"` // of the server's process for a message
	WorkerCPU   float64 `json:"worker_message_us"` // of the workers' process
}

// ScaleResult is the result of one number of workers.
type ScaleResult struct {
	Workers int        `json:"workers"`
	Connect float64    `json:"connect_s"` // until all workers have joined
	Memory  ScaleBytes `json:"server_bytes"`
	Rows    []ScaleRow `json:"rows"`
}

// ScaleBytes is the server's resident memory.
type ScaleBytes struct {
	Alone      int64 `json:"alone"`      // before a worker has connected
	Connection int64 `json:"connection"` // growth, for each worker, once all have connected
	Exchanged  int64 `json:"exchanged"`  // the same after all exchanges
}

// ScaleReport is the file that --json writes.
type ScaleReport struct {
	Head
	Results []ScaleResult `json:"results"`
}

// crowd measures over the workers of this process.
type crowd struct {
	workers []*node.Worker
	server  int // process number
	set     wire.ProcessSet
	values  []values
	rooms   [][]byte
}

// MeasureScale carries out the plan for workers that are all in this process, and the process of their server.
// start starts the workers. A wrong sum is an error, and so is the end of ctx.
func MeasureScale(ctx context.Context, start func() ([]*node.Worker, error), server int, plan ScalePlan) (result ScaleResult, err error) {
	if result.Memory.Alone, err = resident(server); err != nil {
		return result, err
	}
	began := time.Now()
	c := crowd{server: server}
	if c.workers, err = start(); err != nil {
		return result, err
	}
	result.Workers, result.Connect = len(c.workers), time.Since(began).Seconds()
	if result.Memory.Connection, err = c.growth(result.Memory.Alone); err != nil {
		return result, err
	}
	c.values = newCrowd(units.Float32, len(c.workers))
	room := slices.Max(plan.Sizes) * int64(slices.Max(plan.Tensors))
	for rank := range c.workers {
		c.set.Ranks = append(c.set.Ranks, rank)
		c.rooms = append(c.rooms, make([]byte, room))
	}
	for _, bytes := range plan.Sizes {
		for _, tensors := range plan.Tensors {
			row, err := c.row(ctx, bytes, tensors, plan.Duration)
			if err != nil {
				return result, fmt.Errorf("%d workers, %d x %s: %w", len(c.workers), tensors, settings.ShowSize(bytes), err)
			}
			result.Rows = append(result.Rows, row)
		}
	}
	result.Memory.Exchanged, err = c.growth(result.Memory.Alone)
	return result, err
}

// newCrowd is newValues of every rank.
func newCrowd(d units.DType, ranks int) []values {
	all := make([]values, ranks)
	sum := newValues(d, 0, ranks).sum
	for rank := range all {
		all[rank] = values{mine: newValues(d, rank, 0).mine, sum: sum}
	}
	return all
}

func (c *crowd) growth(alone int64) (int64, error) {
	now, err := resident(c.server)
	return (now - alone) / int64(len(c.workers)), err
}

// row repeats one exchange.
func (c *crowd) row(ctx context.Context, bytes int64, tensors int, duration time.Duration) (ScaleRow, error) {
	for range warmUps {
		if _, err := c.exchange(ctx, bytes, tensors); err != nil {
			return ScaleRow{}, err
		}
	}
	var seconds []float64
	server, err := processSeconds(c.server)
	if err != nil {
		return ScaleRow{}, err
	}
	mine := 0.0
	for began := time.Now(); len(seconds) < minRepetitions || time.Since(began) < duration && len(seconds) < rounds*maxRepetitions; {
		before := cpuSeconds()
		took, err := c.exchange(ctx, bytes, tensors)
		if err != nil {
			return ScaleRow{}, err
		}
		mine += took.cpu - before
		seconds = append(seconds, took.seconds)
	}
	after, err := processSeconds(c.server)
	slices.Sort(seconds)
	messages := float64(len(c.workers) * tensors)
	median, all := quantile(seconds, 0.5), messages*float64(len(seconds))
	return ScaleRow{
		Bytes: bytes, Tensors: tensors, Repetitions: len(seconds),
		Median: 1e3 * median, P10: 1e3 * quantile(seconds, 0.1), P90: 1e3 * quantile(seconds, 0.9),
		PerSecond: messages / median, MBps: messages * float64(bytes) / median / 1e6,
		ServerCPU: 1e6 * (after - server) / all, WorkerCPU: 1e6 * mine / all,
	}, err
}

// spent is what an exchange took, and this process's CPU time at its end, before the results are checked.
type spent struct{ seconds, cpu float64 }

// exchange sums tensors over all workers, once.
func (c *crowd) exchange(ctx context.Context, bytes int64, tensors int) (took spent, err error) {
	if ctx.Err() != nil {
		return took, context.Cause(ctx)
	}
	ended := make(chan error, len(c.workers)*tensors)
	groups := make([][]worker.Op, len(c.workers))
	for rank := range c.workers {
		for i := range tensors {
			t := c.rooms[rank][int64(i)*bytes : int64(i+1)*bytes]
			c.values[rank].fill(t, i)
			groups[rank] = append(groups[rank], worker.Op{
				Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Sum, Name: fmt.Sprintf("scale/%d/%d", bytes, i), Prescale: 1, Postscale: 1,
				Shape: []int64{bytes / 4}, Input: t, Output: t, Set: c.set, Done: func(_ worker.Output, err error) { ended <- err },
			})
		}
	}
	began := time.Now()
	for rank, w := range c.workers {
		if err := w.Engine.Submit(groups[rank]); err != nil {
			return took, err
		}
	}
	for range cap(ended) {
		if err := <-ended; err != nil {
			return took, err
		}
	}
	took = spent{time.Since(began).Seconds(), cpuSeconds()}
	for rank := range c.workers {
		for i, op := range groups[rank] {
			if err := c.values[rank].check(op.Output, i); err != nil {
				return took, fmt.Errorf("rank %d: %w", rank, err)
			}
		}
	}
	return took, nil
}

// resident is a process's memory in bytes.
func resident(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	pages, err := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}

// ticksPerSecond is the kernel's unit for programs, on every architecture.
const ticksPerSecond = 100

// processSeconds is the CPU time of another process so far.
func processSeconds(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, after, _ := strings.Cut(string(text), ") ") // the name may hold spaces
	fields := strings.Fields(after)
	user, err := strconv.ParseFloat(fields[11], 64)
	if err != nil {
		return 0, err
	}
	system, err := strconv.ParseFloat(fields[12], 64)
	return (user + system) / ticksPerSecond, err
}

// Show prints the result as a table.
func (r *ScaleResult) Show(out io.Writer) {
	m := r.Memory
	kib := func(bytes int64) float64 { return float64(bytes) / 1024 }
	fmt.Fprintf(out, "%d workers, joined in %.2f s; the server has %.0f KiB, and %.0f KiB for each connection, %.0f KiB after the exchanges\n",
		r.Workers, r.Connect, kib(m.Alone), kib(m.Connection), kib(m.Exchanged))
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "tensors\tmedian ms\tp10\tp90\tmessages/s\tMB/s\tserver us\tworker us\trepetitions\t\n")
	for _, row := range r.Rows {
		fmt.Fprintf(table, "%d x %s\t%.2f\t%.2f\t%.2f\t%.0f\t%.1f\t%.1f\t%.1f\t%d\t\n", row.Tensors, settings.ShowSize(row.Bytes), row.Median, row.P10, row.P90,
			row.PerSecond, row.MBps, row.ServerCPU, row.WorkerCPU, row.Repetitions)
	}
	_ = table.Flush() // as with Fprintf: there is no one to report to
}
