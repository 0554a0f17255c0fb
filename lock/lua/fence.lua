-- The key of the fence has the last fence. For a mutex it also has the token of the holder, behind the
-- fence, after a space, until the holder gives the lease back: at the next grant a token tells that the
-- lease before ended without a release. A token ends with the name of its holder.

-- Returns the last fence, 0 without one, nil for foreign data; and the token, if there is one.
local function lastGrant(call, fence)
  local value = call('GET', fence)
  if not value then return 0 end
  local number, token = string.match(value, '^(%d+) ?(.*)$')
  return number and tonumber(number), token
end

-- Notes that the lease of the token was given back.
local function returned(call, fence, token)
  local last, holder = lastGrant(call, fence)
  if holder == token then call('SET', fence, string.format('%.0f', last), 'KEEPTTL') end
end

-- Returns the reply to an attempt that gets the lock. expired has the tokens whose leases ended without a
-- release.
local function granted(fence, missed, expired)
  if not missed and not expired[1] then return fence end
  local reply = {'held', fence, 0, 0, 0, missed and 1 or 0}
  for _, token in ipairs(expired) do reply[#reply + 1] = token end
  return reply
end
