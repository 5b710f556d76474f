// Package each makes one list of another, which the package slices has no function for.
package each

// Of is what f makes of each element, in their order.
func Of[T, U any](list []T, f func(T) U) []U {
	made := make([]U, len(list))
	for i, one := range list {
		made[i] = f(one)
	}
	return made
}
