// Package migrate has the programs of docs/migrate: for each library that singlefill can replace,
// the same small program before and after, and tests that run both on one Redis.
//
// It is a separate module, so that users of singlefill do not require the other libraries.
package migrate
