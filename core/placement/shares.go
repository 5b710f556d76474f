package placement

import "slices"

// Even is the weights of n equal servers.
func Even(n int) []float64 { return slices.Repeat([]float64{1}, n) }

// Shares is what every server should get of all bytes, where some workers carry servers and some servers are
// dedicated. The busiest links are busy equally: with n workers that hold e each and s dedicated servers
// that hold d each, a worker's link carries 1 + (n-2)e of the model each way, that of a dedicated
// server nd, and ne + sd = 1. From as many dedicated servers as workers on, those hold everything.
func Shares(dedicated []bool) []float64 {
	var n, s float64
	for _, d := range dedicated {
		if d {
			s++
		} else {
			n++
		}
	}
	if n == 0 || s == 0 {
		return Even(len(dedicated))
	}
	d := 1 / s
	if s < n {
		d = 2 * (n - 1) / (n*n + (n-2)*s)
	}
	e := max(0, 1-s*d) / n // the difference may round to less than 0
	weights := make([]float64, len(dedicated))
	for i := range dedicated {
		weights[i] = e
		if dedicated[i] {
			weights[i] = d
		}
	}
	return weights
}
