package reference

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/paceline/paceline/core/barrier"
)

// WarmUp is how long workers have run before the ends of Ends begin. Without it they have hardly drifted
// apart, and waits are a third below those that the paper prints (Table 3).
const WarmUp = 1000 * time.Second

// Ends is the paper's input (section 6.1): for each worker the next predictions ends of iterations whose
// interval is uniform in 1000 to 1500 ms, from a start uniform in 10 to 50 ms.
func Ends(rng *rand.Rand, workers, predictions int, warmUp time.Duration) [][]time.Duration {
	ends := make([][]time.Duration, workers)
	for w := range ends {
		interval := uniform(rng, 1000*time.Millisecond, 1500*time.Millisecond)
		end := uniform(rng, 10*time.Millisecond, 50*time.Millisecond)
		end += warmUp / interval * interval
		for range predictions {
			end += interval
			ends[w] = append(ends[w], end)
		}
	}
	return ends
}

// Waits is the mean and the standard deviation of the least waits of a number of inputs, to the
// millisecond.
func Waits(rng *rand.Rand, workers, predictions, inputs int) (mean, deviation time.Duration) {
	var search barrier.Search
	var sum, squares float64
	for range inputs {
		choice, _ := search.ZipLine(Ends(rng, workers, predictions, WarmUp))
		wait := choice.Wait.Seconds()
		sum += wait
		squares += wait * wait
	}
	average := sum / float64(inputs)
	spread := math.Sqrt(max(squares/float64(inputs)-average*average, 0))
	return milliseconds(average), milliseconds(spread)
}

func milliseconds(seconds float64) time.Duration {
	return time.Duration(math.Round(seconds*1000)) * time.Millisecond
}

func uniform(rng *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(rng.Int64N(int64(to-from)))
}

// Case is a cell of the paper's tables 3 and 4.
type Case struct {
	Workers, Predictions int
	Wait                 time.Duration // least wait that its exact searches found
	Time                 time.Duration // that the fastest of them took; 0 where it prints none
}

// Table3 is the paper's table 3 with the times of table 4.
var Table3 = []Case{
	{10, 15, 599 * time.Millisecond, 90 * time.Microsecond},
	{50, 15, 1103 * time.Millisecond, 0},
	{100, 15, 1228 * time.Millisecond, 2460 * time.Microsecond},
	{500, 15, 1351 * time.Millisecond, 0},
	{1000, 15, 1403 * time.Millisecond, 76800 * time.Microsecond},
	{10, 150, 518 * time.Millisecond, 808 * time.Microsecond},
	{50, 150, 1055 * time.Millisecond, 0},
	{100, 150, 1175 * time.Millisecond, 19300 * time.Microsecond},
	{500, 150, 1307 * time.Millisecond, 0},
	{1000, 150, 1382 * time.Millisecond, 566 * time.Millisecond},
}
