package placement

import (
	"fmt"
	"math"
)

// Exchange time is profiled as in PSLD, section 4.1: a worker measures for how long each server is busy with it in an iteration
// (Meter), without the wait for other workers' pushes, which would spoil every server's profile; fits a line to times and bytes; and
// reports it.

// Line is the time of an exchange with a server by its bytes: Alpha seconds for each, and Beta seconds besides.
type Line struct{ Alpha, Beta float64 }

// At is the time in seconds of an exchange of these bytes.
func (l Line) At(bytes float64) float64 { return l.Alpha*bytes + l.Beta }

// Fit collects one worker's exchanges with one server. The zero value is empty.
type Fit struct{ n, x, y, xx, xy, yy float64 }

// Add adds the bytes and the busy time of an iteration.
func (f *Fit) Add(bytes, seconds float64) {
	f.n++
	f.x += bytes
	f.y += seconds
	f.xx += bytes * bytes
	f.xy += bytes * seconds
	f.yy += seconds * seconds
}

// Sample is what a worker reports of a server: its line, and what that was fitted to.
type Sample struct {
	Line
	Bytes   float64 // exchanged
	Seconds float64 // of all these exchanges together
	Error   float64 // standard error of a predicted time, in seconds, by the distances from the line
}

// Bounds of what a worker may say of a server.
const (
	mostBytes   = 1 << 60
	mostSeconds = 1e6
)

// Check finds a sample that no exchange can have: a number that is none, is negative or beyond all bounds.
func (s Sample) Check() error {
	for _, x := range []struct {
		what  string
		value float64
		least float64
		most  float64
	}{
		{"alpha", s.Alpha, 0, mostSeconds}, {"beta", s.Beta, 0, mostSeconds}, {"error", s.Error, 0, mostSeconds},
		{"bytes", s.Bytes, 1, mostBytes}, {"seconds", s.Seconds, 1e-9, mostSeconds},
	} {
		if !(x.value >= x.least && x.value <= x.most) {
			return fmt.Errorf("%s %v, allowed are %g to %g", x.what, x.value, x.least, x.most)
		}
	}
	return nil
}

// Sample is the line of least squares; false without exchanges. A line that falls, or that begins below 0, comes
// from noise or from sizes that are all alike: then time is proportional to bytes.
func (f *Fit) Sample() (Sample, bool) {
	if f.n == 0 {
		return Sample{}, false
	}
	s := Sample{Bytes: f.x, Seconds: f.y}
	if d := f.n*f.xx - f.x*f.x; d > 1e-9*f.n*f.xx {
		s.Alpha = (f.n*f.xy - f.x*f.y) / d
		s.Beta = (f.y - s.Alpha*f.x) / f.n
	}
	if f.xx == 0 { // only exchanges without bytes
		s.Beta = f.y / f.n
	} else if s.Alpha <= 0 || s.Beta < 0 {
		s.Line = Line{Alpha: f.xy / f.xx}
	}
	off := f.yy - 2*s.Alpha*f.xy - 2*s.Beta*f.y + s.Alpha*s.Alpha*f.xx + 2*s.Alpha*s.Beta*f.x + s.Beta*s.Beta*f.n
	if f.n > 2 {
		s.Error = math.Sqrt(max(0, off) / (f.n - 2) / f.n)
	}
	return s, true
}

// Profile is what workers have reported of one server: a sample of each.
type Profile []Sample

// Predict is the mean of the time, in seconds, of an exchange of these bytes over all workers, and its standard error. Where one
// worker alone has reported, the error is that of its line.
func (p Profile) Predict(bytes float64) (mean, sem float64) {
	n := float64(len(p))
	for _, s := range p {
		mean += s.At(bytes) / n
	}
	if len(p) == 1 {
		return mean, p[0].Error
	}
	var off float64
	for _, s := range p {
		off += (s.At(bytes) - mean) * (s.At(bytes) - mean)
	}
	return mean, math.Sqrt(off / (n - 1) / n)
}

// Speed is the bytes that a server exchanges in a second with a worker: bytes over communication time (section 2.3).
func (p Profile) Speed() float64 {
	var bytes, seconds float64
	for _, s := range p {
		bytes += s.Bytes
		seconds += s.Seconds
	}
	if seconds == 0 {
		return 0
	}
	return bytes / seconds
}

// Profiles is those of all servers by their index; one without samples, and one beyond the end, is of a server that nobody has
// measured, as of one that has just joined: it is predicted at the average of the others (section 5.1).
type Profiles []Profile

func (p Profiles) has(server int) bool { return server < len(p) && len(p[server]) > 0 }

// predict is the mean and the standard error of the time of an exchange of these bytes with a server, in seconds. Where no server has
// been measured, all take a second for a gigabyte.
func (p Profiles) predict(server int, bytes float64) (mean, sem float64) {
	if p.has(server) {
		return p[server].Predict(bytes)
	}
	var known float64
	for _, q := range p {
		if len(q) > 0 {
			m, e := q.Predict(bytes)
			mean, sem, known = mean+m, sem+e, known+1
		}
	}
	if known == 0 {
		return bytes / 1e9, 0
	}
	return mean / known, sem / known
}

// Speeds is the bytes in a second of each of n servers; one that nobody has measured has the average of the others, 1 where
// there are none.
func (p Profiles) Speeds(n int) []float64 {
	speeds := make([]float64, n)
	var sum, known float64
	for s := range speeds {
		if p.has(s) {
			speeds[s] = p[s].Speed()
			sum, known = sum+speeds[s], known+1
		}
	}
	for s := range speeds {
		switch {
		case p.has(s):
		case known > 0:
			speeds[s] = sum / known
		default:
			speeds[s] = 1
		}
	}
	return speeds
}

// variation is (best - worst) / worst of the speeds of measured servers that take keys (section 2.3); 0 where fewer than two are.
func (s *Situation) variation() float64 {
	var best, worst float64
	for i, w := range s.Weights {
		if w > 0 && s.Profiles.has(i) {
			v := s.Profiles[i].Speed()
			best = max(best, v)
			if worst == 0 || v < worst {
				worst = v
			}
		}
	}
	if worst == 0 {
		return 0
	}
	return (best - worst) / worst
}
