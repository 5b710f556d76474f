package jobtest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/worker"
)

// Means is a training run of an elastic job in which some ranks are lost, and what it should give: at each step the mean of a tensor
// of pseudo-random numbers.
type Means struct {
	Ranks, Elements, Steps int
	Servers                int // over which tensors are cut
	Lost                   []int
	Value                  string       // the synchronisation model of a held value that processes use beside; "" for none
	Codec                  string       // of a sum at each step, whose bits are alike on all; "" for none
	Heirs                  bool         // servers are lost too: what a lost rank alone had got may be made anew without it, after which it has pushed
	Results                [][][]uint64 // by rank and step: a hash of each partition, and of the coded sum; nil for a rank that was lost

	cuts   []int // where each partition begins, in bytes, and the end
	inputs inputs
}

// inputs are what the ranks give at a step.
type inputs struct {
	step  int
	bytes [][]byte // by rank; nil: not made yet
}

func (m *Means) input(rank, step int) []byte {
	if m.inputs.step != step || m.inputs.bytes == nil {
		m.inputs = inputs{step, make([][]byte, m.Ranks)}
	}
	if m.inputs.bytes[rank] == nil {
		m.inputs.bytes[rank] = meansInput(m.Elements, rank, step)
	}
	return m.inputs.bytes[rank]
}

// NewMeans draws a run.
func NewMeans(random *rand.Rand, ranks, elements, steps, servers int) *Means {
	return &Means{
		Ranks: ranks, Elements: elements, Steps: steps, Servers: servers, Lost: random.Perm(ranks)[:1+random.IntN(ranks-1)],
		Results: make([][][]uint64, ranks), cuts: cutsOf(elements, servers),
	}
}

// cutsOf is where the partitions of so many float32 begin under SmallPartitions, and the end.
func cutsOf(elements, servers int) []int {
	cuts := []int{0}
	for _, bytes := range placement.Cut(uint64(4*elements), 4, Partition, servers, nil) {
		cuts = append(cuts, cuts[len(cuts)-1]+int(bytes))
	}
	return cuts
}

// Train has a rank of a job do its part, and notes what it gets.
func (m *Means) Train(j *Job, rank int) error {
	for step := range m.Steps {
		got, err := m.step(j, rank, step)
		if err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
		m.Results[rank] = append(m.Results[rank], got)
	}
	return nil
}

// step is one of a rank: the mean, the coded sum where there is one, an allgather and a broadcast. The names of three means in a row differ.
func (m *Means) step(j *Job, rank, step int) ([]uint64, error) {
	mean, err := m.average(j, rank, step, fmt.Sprint("x", step%3), "")
	got := hashes(mean, m.cuts)
	if err == nil && m.Codec != "" {
		mean, err = m.average(j, rank, step, "coded", CodedBy(m.Codec))
		got = append(got, hashes(mean, []int{0, len(mean)})...)
	}
	if err == nil {
		var rows uint64
		rows, err = m.gather(j, rank, step)
		got = append(got, rows)
	}
	if err == nil {
		var bytes uint64
		bytes, err = m.broadcast(j, rank, step)
		got = append(got, bytes)
	}
	return got, err
}

// gather is an allgather of rows of all lengths. Those of a rank are there, or it is lost, and then on all alike: that says the hash.
func (m *Means) gather(j *Job, rank, step int) (uint64, error) {
	in := m.bytes(rank, step, step*rank%7)
	out, err := j.Do(rank, worker.Op{Kind: units.Allgather, DType: units.Uint8, Shape: []int64{int64(len(in))}, Input: in, Name: "rows"})
	if err != nil {
		return 0, err
	}
	var lengths []byte
	rest := out.Data
	for from, n := range out.Rows {
		want := m.bytes(from, step, step*from%7)
		if n != int64(len(want)) && (n > 0 || from == rank) || !bytes.Equal(rest[:n], want[:n]) {
			return 0, fmt.Errorf("an allgather brings %d bytes of rank %d, which gave %d, or others", n, from, len(want))
		}
		rest = rest[n:]
		lengths = fmt.Appendln(lengths, n)
	}
	if len(rest) > 0 {
		return 0, fmt.Errorf("an allgather brings %d bytes of nobody", len(rest))
	}
	return hash(lengths), nil
}

// broadcast is one of each rank in turn. All have what it gives, or all an error: zero.
func (m *Means) broadcast(j *Job, rank, step int) (uint64, error) {
	root := step % len(j.All().Ranks)
	want := m.bytes(root, step, 1+step%5)
	in, out := make([]byte, len(want)), make([]byte, len(want))
	if rank == root {
		copy(in, want)
	}
	_, err := j.Do(rank, worker.Op{Kind: units.Broadcast, DType: units.Uint8, Root: root, Shape: []int64{int64(len(want))}, Input: in, Output: out, Name: fmt.Sprint("broadcast", step%2)})
	switch {
	case errors.Is(err, worker.ErrUnsupported) && (m.Lost == nil || slices.Contains(m.Lost, root)): // a process does not know whom it loses
		return 0, nil
	case err == nil && !bytes.Equal(out, want):
		err = errors.New("a broadcast brings other bytes")
	}
	return 1, err
}

// bytes are some of a rank's at a step, of a length in sevenths.
//
//go:norace
func (m *Means) bytes(rank, step, sevenths int) []byte {
	b := make([]byte, m.Elements*sevenths/7)
	for i := range b {
		b[i] = byte(i ^ i>>8*13 ^ (step*31 + rank*7))
	}
	return b
}

// average is that of what ranks give at a step.
func (m *Means) average(j *Job, rank, step int, name, codec string) ([]byte, error) {
	in := meansInput(m.Elements, rank, step)
	op := worker.Op{Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Average, Shape: []int64{int64(m.Elements)}, Input: in, Output: in, Name: name}
	op.Codec = codec
	_, err := j.Do(rank, op)
	return in, err
}

func meansInput(elements, rank, step int) []byte {
	return NormalFloats(elements, uint64(rank), uint64(step))
}

// hashes has one of each partition.
func hashes(b []byte, cuts []int) (all []uint64) {
	for i, from := range cuts[:len(cuts)-1] {
		all = append(all, hash(b[from:cuts[i+1]]))
	}
	return all
}

// Check holds the survivors' results against the reference: the same bits on all, each partition the mean over all survivors and some
// of the lost, and over nobody who was missing in it before.
func (m *Means) Check() error {
	live := m.live(0)
	missing := make([]uint, len(m.cuts)-1) // by partition: which of the lost it was closed without
	for step, got := range m.Results[live[0]] {
		for _, rank := range live {
			if !slices.Equal(m.Results[rank][step], got) {
				return fmt.Errorf("step %d: ranks %d and %d differ", step, live[0], rank)
			}
		}
		for part := range missing {
			without, found := m.without(missing[part], step, part, got[part])
			if !found {
				return fmt.Errorf("step %d, partition %d is the mean of no set of ranks that there can be", step, part)
			}
			if !m.Heirs {
				missing[part] = without
			}
		}
	}
	for _, rank := range live {
		if n := len(m.Results[rank]); n != m.Steps {
			return fmt.Errorf("rank %d has done %d steps of %d", rank, n, m.Steps)
		}
	}
	return nil
}

// without finds the lost ranks without which a partition is right, beside those that were missing before.
func (m *Means) without(before uint, step, part int, got uint64) (missing uint, found bool) {
	for missing := range uint(1) << len(m.Lost) {
		if missing&before == before && m.of(m.live(^missing), step, part) == got {
			return missing, true
		}
	}
	return 0, false
}

// live are the ranks that are never lost, and those of the lost whose bit is set.
func (m *Means) live(lost uint) (ranks []int) {
	for rank := range m.Ranks {
		if i := slices.Index(m.Lost, rank); i < 0 || lost != 0 && lost&(1<<i) != 0 {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// of is the mean of one partition over some ranks, added in their order as the servers do.
func (m *Means) of(ranks []int, step, part int) uint64 {
	var acc []byte
	for i, rank := range ranks {
		b := m.input(rank, step)[m.cuts[part]:m.cuts[part+1]]
		if i == 0 {
			acc = make([]byte, len(b))
			reduce.Load(units.Float32, acc, b, 1)
		} else {
			reduce.Add(units.Sum, units.Float32, acc, b, 1)
		}
	}
	out := make([]byte, len(acc))
	reduce.Store(units.Float32, out, acc, 1, float64(len(ranks)))
	return hashes(out, []int{0, len(out)})[0]
}

// meansOf names the variable with the elements, the steps, the servers, the value and the codec of a run whose rank a process plays.
const meansOf = "PACELINE_TEST_MEANS"

const meansFormat = "%d %d %d %q %q"

// trainMeans plays a rank of the run that the text describes in a process of its own, and prints what it gets. Of a value it checks what it reads.
func trainMeans(j *Job, rank int, text string) error {
	var m Means
	if _, err := fmt.Sscanf(text, meansFormat, &m.Elements, &m.Steps, &m.Servers, &m.Value, &m.Codec); err != nil {
		return err
	}
	m.cuts = cutsOf(m.Elements, m.Servers)
	var longest time.Duration
	value := j.Shares(rank, "value", m.Value, m.Elements)
	if m.Value != "" {
		if err := value.Use(units.Declare, 10); err != nil {
			return err
		}
	}
	for step := range m.Steps {
		began := time.Now()
		got, err := m.step(j, rank, step)
		if err == nil && m.Value != "" {
			err = value.Play([]units.Use{units.Add | units.Read, units.Add, units.Add | units.ReadNow}[step%3])
		}
		if err != nil {
			return err
		}
		longest = max(longest, time.Since(began))
		fmt.Println("mean", step, strings.Trim(fmt.Sprint(got), "[]"))
		time.Sleep(5 * time.Millisecond) // a script computes; what happens to the job comes in the middle of it
	}
	fmt.Println("done", longest.Seconds())
	return nil
}

// Heard reads what a rank has printed, and reports whether it is not the last line, whose number is the longest step in seconds.
func (m *Means) Heard(rank int, line string) (longest float64, more bool, err error) {
	words := strings.Fields(line)
	if len(words) < 2 || words[0] != "mean" && words[0] != "done" {
		return 0, false, fmt.Errorf("rank %d says %q", rank, line)
	}
	if words[0] == "done" {
		longest, err = strconv.ParseFloat(words[1], 64)
		return longest, false, err
	}
	var got []uint64
	for _, w := range words[2:] {
		h, err := strconv.ParseUint(w, 10, 64)
		if err != nil {
			return 0, false, err
		}
		got = append(got, h)
	}
	m.Results[rank] = append(m.Results[rank], got)
	return 0, true, nil
}

// Env is the environment of the processes that play the run.
func (m *Means) Env() []string {
	return []string{"PACELINE_ELASTIC=1", fmt.Sprint("PACELINE_PARTITION_BYTES=", Partition), fmt.Sprintf("%s="+meansFormat, meansOf, m.Elements, m.Steps, m.Servers, m.Value, m.Codec)}
}
