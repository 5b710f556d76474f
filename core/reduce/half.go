package reduce

func widen(dst []float32, src []uint16, convert func(uint16) float32) {
	for i, h := range src {
		dst[i] = convert(h)
	}
}

func narrow(dst []uint16, src []float32, convert func(float32) uint16) {
	for i, f := range src {
		dst[i] = convert(f)
	}
}
