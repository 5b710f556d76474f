package reduce

// convert converts each element: 16-bit floats to float32, or back.
func convert[T, F any](dst []T, src []F, one func(F) T) {
	for i, x := range src {
		dst[i] = one(x)
	}
}
