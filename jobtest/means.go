package jobtest

import (
	"errors"
	"fmt"
	"hash/fnv"
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
		if step%10 == 9 { // it ends well, or with an error on all: a rank was lost between its sizes and its rows
			if _, err := j.Do(rank, Float32s(units.Allgather, "rows", int64(rank), 2)); err != nil && !errors.Is(err, worker.ErrUnsupported) {
				return fmt.Errorf("step %d: %w", step, err)
			}
		}
	}
	return nil
}

// step is one of a rank: the mean, and the coded sum where there is one. The names of three in a row differ.
func (m *Means) step(j *Job, rank, step int) ([]uint64, error) {
	mean, err := m.average(j, rank, step, fmt.Sprint("x", step%3), "")
	got := hashes(mean, m.cuts)
	if err == nil && m.Codec != "" {
		mean, err = m.average(j, rank, step, "coded", CodedBy(m.Codec))
		got = append(got, hashes(mean, []int{0, len(mean)})...)
	}
	return got, err
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
	return Elements(units.Float32, Normal(elements, uint64(rank), uint64(step)))
}

// hashes has one of each partition.
func hashes(b []byte, cuts []int) (all []uint64) {
	for i, from := range cuts[:len(cuts)-1] {
		h := fnv.New64a()
		h.Write(b[from:cuts[i+1]])
		all = append(all, h.Sum64())
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
